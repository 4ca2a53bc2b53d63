"""The supervisor of a child process as its worker has it: started, spoken to through a pipe, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import NamedTuple

from asyncrl.child_pool.frames import Setup
from asyncrl.process import ChildProcess, python

_BOOT = (
    "import sys; sys.path[:] = sys.argv[3:]; from asyncrl.child_pool.supervisor import main; "
    "main(int(sys.argv[1]), float(sys.argv[2]))"
)


class Link(NamedTuple):
    """A supervisor, and a pipe to its child and one back: not the process object's, whose `wait` would wait for them.

    Two, because a socket that is closed with calls unread resets its other end, and replies on their way are lost.
    """

    process: ChildProcess
    replies: asyncio.StreamReader
    answering: asyncio.StreamWriter  # of the replies' pipe, to close it
    calls: asyncio.StreamWriter

    @classmethod
    async def open(cls, time_limit_s: float, stderr: int | None) -> Link:
        """Start a supervisor."""
        (calls_ours, calls_theirs), (replies_ours, replies_theirs) = socket.socketpair(), socket.socketpair()
        try:
            # A separate session: an interrupt in the terminal is for the worker, which ends its children itself.
            process = await asyncio.create_subprocess_exec(
                *python("-c", _BOOT, str(os.getpid()), str(time_limit_s), *sys.path),
                stdin=calls_theirs.fileno(),
                stdout=replies_theirs.fileno(),
                stderr=stderr,
                # Iterating over a set follows the hash seed, and rows of some data sets follow that.
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
        except BaseException:
            calls_ours.close()
            replies_ours.close()
            raise
        finally:
            calls_theirs.close()
            replies_theirs.close()
        replies, answering = await asyncio.open_unix_connection(sock=replies_ours)
        _, calls = await asyncio.open_unix_connection(sock=calls_ours)
        return cls(ChildProcess(process), replies, answering, calls)

    async def end(self, group: int = 0) -> None:
        """End a child by its supervisor, which kills until nothing is left; a supervisor that does not is killed.

        Args:
            group: of the child, to be killed where its supervisor was; the child itself dies with the supervisor.
        """
        self.process.send_signal(signal.SIGCONT)  # a function may have stopped it
        if await self.process.end() == -signal.SIGKILL and group:
            with contextlib.suppress(ProcessLookupError):  # nothing is left of it: the usual case
                os.killpg(group, signal.SIGKILL)
        self.calls.transport.abort()
        self.answering.transport.abort()

    def exit_text(self, setup: Setup, *, ended: bool = False) -> str:
        """Return how the child ended.

        Args:
            ended: by its pool, for a fault that is known.
        """
        code = self.process.returncode
        if code is None or code >= 0:
            return f"exit code {code}"
        text = f"killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL and not ended:
            return f"{text}, as the kernel does where the machine has no memory left"
        if -code == signal.SIGABRT and setup.memory_mb:
            return f"{text}, as native code ends that needs more than {setup.memory_text}"
        return text
