"""The time limit of a program that works with the policy as its model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from asyncrl.harnesses.harness import HarnessFailed
from asyncrl.sandboxes.sandbox import FileRefused

if TYPE_CHECKING:
    from asyncrl.rollout.endpoint import Endpoint


async def within(work: Coroutine[Any, Any, None], endpoint: Endpoint, limit_s: float) -> str:
    """Do the work of a program for so long, without the time in which it waits for the policy.

    Returns:
        Why it failed, or "".

    Raises:
        SandboxError: the sandbox failed, not the program.
    """
    task, began = asyncio.ensure_future(work), time.monotonic()
    try:
        while not task.done():
            left = limit_s - (time.monotonic() - began - endpoint.waited_s)
            if left <= 0:
                return f"the program ran longer than time_limit_s = {limit_s:g}"
            await asyncio.wait({task}, timeout=left)
        task.result()
    except (HarnessFailed, FileRefused) as error:  # a program may have made a folder of a file that is written
        return str(error)
    finally:
        task.cancel()
        await asyncio.wait({task})
    return ""
