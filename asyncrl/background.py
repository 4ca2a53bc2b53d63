"""Background tasks: held while they run, since the event loop holds tasks only weakly, and never failing unseen."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class BackgroundTasks:
    """The background tasks of one owner."""

    def __init__(self, on_fault: Callable[[BaseException], None] | None = None) -> None:
        self._on_fault = on_fault  # is given what a task raises; None leaves that to the log of the event loop
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin some work."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel all."""
        for task in self._tasks:
            task.cancel()

    async def ended(self) -> None:
        """Wait until all have ended, with any result."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self._on_fault is not None and not task.cancelled() and (error := task.exception()) is not None:
            self._on_fault(error)


async def first_of(*waits: Coroutine[Any, Any, object] | asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Wait until one of several is done, or the time is up; coroutines that are not done then are cancelled."""
    futures = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future, wait in zip(futures, waits, strict=True):
            if future is not wait:
                future.cancel()


async def sleep_unless_failed(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Wait while tasks without an end run; raise what one of them raises."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> None:
    """Await work, and cancel it when an event is set; exceptions pass through."""
    task = asyncio.ensure_future(work)
    try:
        await first_of(task, event.wait())
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def all_of(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Await several and return their results; if one fails, the others end, and its error is raised."""
    if len(works) == 1:  # in this task: on a busy loop each task more waits for its turn, at its begin and at its end
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def on_daemon_thread(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Run a function that a cancellation leaves alone on its thread; the program ends without waiting for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(put: Callable[[Any], None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if done.done() else put(value))

    def run() -> None:
        try:
            tell(done.set_result, function(*arguments, **options))
        except Exception as error:  # the caller raises it
            tell(done.set_exception, error)

    threading.Thread(target=run, daemon=True).start()
    return await done


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work that a cancellation does not cut short: it is raised when the work has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
