"""Frames: length-prefixed MessagePack over pipes and sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import msgspec

from asyncrl.errors import AsyncRLError

READ_BYTES = 1 << 16
_STREAM_BYTES = 1 << 18
_encoder = msgspec.msgpack.Encoder()


def pack(message: msgspec.Struct) -> bytes:
    """One frame: four bytes of length, little-endian, then MessagePack."""
    frame = bytearray(4)
    _encoder.encode_into(message, frame, 4)
    frame[:4] = (len(frame) - 4).to_bytes(4, "little")
    return bytes(frame)


class FrameError(AsyncRLError):
    """Bytes that cannot be frames."""


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self, most_bytes: int = (1 << 32) - 1) -> None:
        self._rest = bytearray()
        self._most_bytes = most_bytes  # of one frame

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that `data` completes.

        Raises:
            FrameError: a frame begins that would be too long.
        """
        self._rest += data
        while len(self._rest) >= 4:
            size = int.from_bytes(self._rest[:4], "little")
            if size > self._most_bytes:
                raise FrameError(f"a frame of {size} bytes; at most {self._most_bytes} were expected")
            if len(self._rest) < 4 + size:
                return
            frame = bytes(self._rest[4 : 4 + size])
            del self._rest[: 4 + size]
            yield frame


async def read_frames(reader: asyncio.StreamReader, silence_s: float | None = None) -> AsyncIterator[bytes]:
    """The frames of a stream, until it ends or nothing comes for twice the seconds of silence."""
    frames = Frames()
    while data := await read_within(reader, silence_s):
        for frame in frames.feed(data):
            yield frame


async def read_within(reader: asyncio.StreamReader, silence_s: float | None) -> bytes:
    """Return what comes next; nothing where the stream ends, or nothing comes for twice the seconds of silence."""
    for _ in range(2):  # once more: this process may have been stopped
        with contextlib.suppress(OSError):  # a TimeoutError is one
            async with asyncio.timeout(silence_s):
                return await reader.read(_STREAM_BYTES)
    return b""


async def write_heartbeats(writer: asyncio.StreamWriter, heartbeat: bytes, every_s: float) -> None:
    """Write a heartbeat again and again; the end of the other side is found by those who read from it."""
    while True:
        writer.write(heartbeat)
        with contextlib.suppress(OSError):
            await writer.drain()
        await asyncio.sleep(every_s)
