"""Messages that a gateway has to store while the NATS server is unreachable: a file, encrypted, in their order."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

from asyncrl.bus.publish import Prepared
from asyncrl.errors import AsyncRLError
from asyncrl.locks import try_lock
from topics.secrets import SECRET_MADE
from topics.wire import SEALED

_HEAD = 12  # bytes before a record: its length, and a digest of it
_ERASED = bytes(8)  # in place of the digest
_WIPED = 2**20  # bytes that are overwritten at a time


class SpoolFault(AsyncRLError):
    """The disk does not take a record, or does not give it back."""


class SpoolTaken(AsyncRLError):
    """Another process has the file."""


class Waiting(msgspec.Struct):
    """A message that waits to be stored."""

    at_ns: int  # since 1970, when it was put there
    message: Prepared

    @property
    def secrets(self) -> list[str]:
        """Return the data keys that it is sealed under, or the one that it holds."""
        message = self.message
        named = message.key if message.topic == SECRET_MADE.name else message.headers.get(SEALED, "")
        return [secret for secret in named.split(",") if secret]


class Spool:
    """Messages that wait, the oldest first; those of a process that was killed are there again.

    While it is open no other process can open its file.
    """

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
            SpoolTaken: another process has it.
            OSError: the file cannot be made or read.
        """
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        if not try_lock(self._file):
            self.close()
            words = "another process of this gateway has it open; end that one first, its facts would be lost"
            raise SpoolTaken(f"the spool {self._path}: {words}")
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
            elif head[4:] != _ERASED:
                self.damaged += 1
        os.ftruncate(self._file, self._end)

    def add(self, waiting: Waiting) -> None:
        """Append a message.

        Raises:
            SpoolFault: the disk does not take it; earlier content is unchanged.
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
        return self._read(*self._waiting[0])

    def _read(self, begin: int, end: int) -> Waiting:
        try:
            return msgspec.msgpack.decode(os.pread(self._file, end - begin, begin), type=Waiting)
        except (OSError, ValueError) as error:
            raise SpoolFault(f"{self._path}, bytes {begin} to {end}: {error}") from error

    def drop_first(self) -> None:
        """Forget the oldest message. After the last one the file is overwritten: it may have data keys.

        Raises:
            SpoolFault: the disk refuses; then the next message overwrites it.
        """
        self._waiting.popleft()
        try:
            self._empty_if_done()
        except OSError as error:
            raise SpoolFault(f"{self._path} cannot be emptied: {error}") from error

    def erase(self, chosen: Callable[[Waiting], bool]) -> int:
        """Overwrite those of the messages that are chosen, or cannot be read back; returns how many they were."""
        kept = deque[tuple[int, int]]()
        for begin, end in self._waiting:
            with contextlib.suppress(SpoolFault):
                if not chosen(self._read(begin, end)):
                    kept.append((begin, end))
                    continue
            os.pwrite(self._file, _ERASED + bytes(end - begin), begin - len(_ERASED))
        erased, self._waiting = len(self._waiting) - len(kept), kept
        os.fdatasync(self._file)
        self._empty_if_done()
        return erased

    def _empty_if_done(self) -> None:
        if not self._waiting:
            for begin in range(0, self._end, _WIPED):
                os.pwrite(self._file, bytes(min(_WIPED, self._end - begin)), begin)
            os.fdatasync(self._file)
            os.ftruncate(self._file, 0)
            self._end = 0

    def close(self) -> None:
        """Close the file, and let others have it; what waits stays in it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
