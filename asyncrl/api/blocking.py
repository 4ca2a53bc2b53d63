"""Waiting for work that needs an event loop, also on a thread whose event loop runs already, as in a notebook."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def on_thread(function: Callable[[], T]) -> T:
    """Call a function that runs an event loop itself."""
    with ThreadPoolExecutor(1, "asyncrl") as pool:
        return pool.submit(function).result()


def result_of(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on another thread and return its result; an interrupt cancels the coroutine."""
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def run() -> T:
        task = asyncio.ensure_future(work)
        begun.append((asyncio.get_running_loop(), task))
        return await task

    with ThreadPoolExecutor(1, "asyncrl") as pool:
        running = pool.submit(asyncio.run, run())
        try:
            return running.result()
        except KeyboardInterrupt:
            for loop, task in begun if not running.done() else []:
                loop.call_soon_threadsafe(task.cancel)
            raise
