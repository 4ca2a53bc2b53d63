"""What a gateway has to store while the NATS server is away: a file, sealed as it is stored, in the order it came."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path

import msgspec
import xxhash

from asyncrl.bus.publish import Prepared
from asyncrl.errors import AsyncRLError

_HEAD = 12  # bytes before a record: its length, and a digest of it
_WIPED = 2**20  # bytes that are overwritten at a time


class SpoolFault(AsyncRLError):
    """The disk does not take a record, or does not give it back."""


class Waiting(msgspec.Struct):
    """A message that waits to be stored."""

    at_ns: int  # since 1970, when it was put there
    message: Prepared


class Spool:
    """Messages that wait, the oldest first; those of a process that was killed are there again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._end = 0  # bytes of the file
        self.damaged = 0  # records that were left out at the start: their bytes changed on the disk
        self._waiting: deque[tuple[int, int]] = deque()  # where the body of each begins and ends

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def taken(self) -> int:
        """Return the bytes of the file."""
        return self._end

    def open(self) -> None:
        """Find what a process before this one left; the last record may have been cut with it.

        Raises:
            OSError: the file cannot be made or read.
        """
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        size = os.fstat(self._file).st_size
        while self._end + _HEAD <= size:
            head = os.pread(self._file, _HEAD, self._end)
            begin, length = self._end + _HEAD, int.from_bytes(head[:4], "little")
            body = os.pread(self._file, length, begin) if begin + length <= size else b""
            if not length or len(body) < length:
                break
            self._end = begin + length
            if xxhash.xxh3_64_digest(body) == head[4:]:
                self._waiting.append((begin, self._end))
            else:
                self.damaged += 1
        os.ftruncate(self._file, self._end)

    def add(self, waiting: Waiting) -> None:
        """Write a message behind the others.

        Raises:
            SpoolFault: the disk does not take it; what was there before is as it was.
        """
        body = msgspec.msgpack.encode(waiting)
        raw = len(body).to_bytes(4, "little") + xxhash.xxh3_64_digest(body) + body
        try:
            if os.pwrite(self._file, raw, self._end) < len(raw):
                raise OSError("no space left")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise SpoolFault(f"{self._path} takes no more: {error}; free some space") from error
        self._waiting.append((self._end + _HEAD, self._end + len(raw)))
        self._end += len(raw)

    def first(self) -> Waiting:
        """Return the oldest message.

        Raises:
            SpoolFault: it cannot be read back.
        """
        begin, end = self._waiting[0]
        try:
            return msgspec.msgpack.decode(os.pread(self._file, end - begin, begin), type=Waiting)
        except (OSError, msgspec.MsgspecError) as error:
            raise SpoolFault(f"{self._path}, bytes {begin} to {end}: {error}") from error

    def drop_first(self) -> None:
        """Forget the oldest message. Behind the last one the file is overwritten: it may have data keys."""
        self._waiting.popleft()
        if not self._waiting:
            for begin in range(0, self._end, _WIPED):
                os.pwrite(self._file, bytes(min(_WIPED, self._end - begin)), begin)
            os.fdatasync(self._file)
            os.ftruncate(self._file, 0)
            self._end = 0

    def close(self) -> None:
        """Close the file; what waits stays in it."""
        if self._file >= 0:
            os.close(self._file)
