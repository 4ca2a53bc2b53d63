"""Child processes: gone with whoever started them, and ended in good time."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel (Linux) to kill this process when the one that started it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def end(process: asyncio.subprocess.Process, within_s: float = 5.0) -> None:
    """Ask a process to leave, and kill it if it does not."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
