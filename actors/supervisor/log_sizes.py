"""The size limit of logs: it holds even if an actor, or a user's function, prints without end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import msgspec

from actors.runtime.actor import Context

_POLL_S = 1.0  # between two looks: nothing announces that a file grew
_KEPT = 4  # a quarter of it is kept


async def bound_logs(context: Context) -> None:
    """Keep the logs of the run's directory below the size that the settings give."""
    most_bytes = context.config.supervision.log_mb * 1_000_000
    while True:
        for path in context.files.logs.glob("*.log"):
            with contextlib.suppress(OSError):  # the next look is as good
                await asyncio.to_thread(cut_log, path, most_bytes)
        await asyncio.sleep(_POLL_S)


def cut_log(path: Path, most_bytes: int) -> None:
    """Leave the newest lines of a log that is too large. Writers open the file in append mode, so they continue at its
    new end.

    Raises:
        OSError: it is gone, or the disk refused it.
    """
    handle = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        size, kept = os.fstat(handle).st_size, most_bytes // _KEPT
        if size <= most_bytes:
            return
        newest = os.pread(handle, kept, size - kept).partition(b"\n")[2]
        said = {"event": "log cut: it was too large", "level": "warning", "bytes": size - len(newest)}
        os.ftruncate(handle, 0)
        for content in (msgspec.json.encode(said) + b"\n", newest):
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(handle, rest) :]
    finally:
        os.close(handle)
