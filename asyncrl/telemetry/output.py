"""Output of a process: if its file takes no more, the output is lost, and the process continues."""

from __future__ import annotations

import io
import os
import sys


class _Lossy(io.RawIOBase):
    """A file to write to, by its descriptor. It has no buffer: one that is not empty is an error at exit."""

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._number

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self._number)

    def writable(self) -> bool:
        """Return that it takes words."""
        return True

    def write(self, words: object) -> int:
        """Write, as far as there is room; returns the number of bytes given.

        Raises:
            BrokenPipeError: the reader has gone.
        """
        rest = whole = bytes(words)  # type: ignore[call-overload]
        try:
            while rest:
                rest = rest[os.write(self._number, rest) :]
        except BrokenPipeError:
            raise
        except OSError:
            pass  # its disk is full
        return len(whole)


def print_lossy() -> None:
    """From now on, drop all output of this process, its log too, that a full disk does not take."""
    for stream, number in (("stdout", 1), ("stderr", 2)):
        getattr(sys, stream).flush()
        setattr(sys, stream, io.TextIOWrapper(_Lossy(number), "utf-8", "backslashreplace", line_buffering=True))
