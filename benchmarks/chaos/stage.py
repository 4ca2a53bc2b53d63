"""The run under chaos: `asyncrl up` in a separate process, resumed when it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from asyncrl.crash import CRASH_FOLDER
from asyncrl.errors import AsyncRLError
from asyncrl.process import python, with_parent
from asyncrl.run.fault_injection import Part, parts

_START_S = 120.0  # for `up` to name the run
_GONE_S = 60.0  # for the kernel to end all processes of a killed `up`


class ChaosError(AsyncRLError):
    """The run under chaos did not start, or the witness cannot follow it."""


class Stage:
    """A run that is resumed each time that chaos kills `up`."""

    def __init__(self, crash_folder: Path) -> None:
        self.crash_folder = crash_folder
        self.root = Path()
        self.resumed = 0
        self.words = ""  # the last output of `up`
        self._up: asyncio.subprocess.Process | None = None
        self._named = asyncio.Event()
        self._running: asyncio.Task[int] | None = None

    async def start(self, words: Sequence[str], limit_s: float = _START_S) -> asyncio.Task[int]:
        """Start `asyncrl up WORDS`; the returned task ends with the run, with its exit code.

        Args:
            limit_s: time for `up` to name the run.

        Raises:
            ChaosError: the run does not start; the error has its output.
        """
        running = self._running = asyncio.create_task(self._run(words))
        named = asyncio.create_task(self._named.wait())
        await asyncio.wait({running, named}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        named.cancel()
        if not self._named.is_set():
            why = "" if running.done() else f" within {limit_s:.0f} s"
            await self.stop()
            raise ChaosError(f"the run did not start{why}:\n{self.words.strip()}")
        return running

    async def stop(self) -> None:
        """End all living processes.

        Raises:
            ChaosError: some processes do not end.
        """
        if self._running is not None:
            self._running.cancel()
        if self._up is not None:
            if self._up.returncode is None:
                self._up.kill()
                await self._up.wait()
            await self._all_gone()

    def parts(self) -> list[Part]:
        """Return the living processes of the run that have a role."""
        found = parts(self.root) if self._named.is_set() else []
        if self._up is not None and self._up.returncode is None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                found.append(Part("up", "up", psutil.Process(self._up.pid)))
        return found

    async def _run(self, words: Sequence[str]) -> int:
        code = await self._follow(words)
        while code == -signal.SIGKILL:
            await self._all_gone()
            self.resumed += 1
            code = await self._follow(["--resume", str(self.root)])
        return code

    async def _follow(self, words: Sequence[str]) -> int:
        self._up = await asyncio.create_subprocess_exec(
            *python("-m", "asyncrl.cli.main", "up", *words),
            env={**os.environ, CRASH_FOLDER: str(self.crash_folder)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=with_parent(),
            start_new_session=True,  # this program handles Ctrl-C for it
        )
        assert self._up.stdout is not None
        while line := (await self._up.stdout.readline()).decode(errors="replace"):
            self.words = (self.words + line)[-4000:]
            if not self._named.is_set() and line.startswith("run ") and " in " in line:
                self.root = Path(line.rstrip().split(" in ", 1)[1])
                self._named.set()
            if self._named.is_set():
                with (self.root / "up.log").open("a") as log:
                    log.write(line)
        return await self._up.wait()

    async def _all_gone(self) -> None:
        """Wait until the kernel has ended all processes that a dead `up` started.

        Raises:
            ChaosError: some processes still run.
        """
        until = time.monotonic() + _GONE_S
        while left := self._inherited():
            if time.monotonic() > until:
                raise ChaosError(f"`asyncrl up` ended, but its processes still run: {', '.join(left)}")
            await asyncio.sleep(0.02)  # no event announces the end of a process

    def _inherited(self) -> list[str]:
        """Return the command lines of all living processes that inherited the crash folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has just ended, or belongs to another user
                if process.environ().get(CRASH_FOLDER) == str(self.crash_folder):
                    found += [" ".join(process.cmdline())] * (process.status() != psutil.STATUS_ZOMBIE)
        return found
