"""The output of a program in a sandbox, read from two pipes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from asyncrl.sandboxes.sandbox import OnOutput, Stream

_READ_BYTES = 1 << 16


class ProgramOutput:
    """Gives each piece of output to `on_output` when it comes, up to a number of bytes."""

    def __init__(self, on_output: OnOutput, most_bytes: int, on_excess: Callable[[], None]) -> None:
        """
        Args:
            most_bytes: of both streams together.
            on_excess: is called once, when there is more.
        """
        self._on_output, self._left, self._on_excess = on_output, most_bytes, on_excess
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, Stream] = {}
        self.exceeded = False
        ends = []
        for name in ("stdout", "stderr"):
            reads, writes = os.pipe()
            os.set_blocking(reads, False)
            self._open[reads] = name
            self._loop.add_reader(reads, self._read, reads)
            ends.append(writes)
        self.fds = tuple(ends)
        """Ends of the pipes that the program writes to; the caller closes them."""

    def finish(self) -> None:
        """Read what the pipes hold; processes that are left may keep them open."""
        for fd in [*self._open]:
            while self._read(fd):
                pass

    def close(self) -> None:
        """Read no more."""
        for fd in [*self._open]:
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        del self._open[fd]
        self._loop.remove_reader(fd)
        os.close(fd)

    def _read(self, fd: int) -> bool:
        """Read once; returns whether there may be more now."""
        if fd not in self._open:
            return False
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._drop(fd)
            return False
        name, given = self._open[fd], data[: self._left]
        self._left -= len(given)
        if len(given) < len(data):
            self.exceeded = True
            self.close()
            self._on_excess()
        if given:
            self._on_output(name, given)
        return not self.exceeded
