"""Turns of the event loop while the engine computes: who waits is woken after a step, and changes are made then."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class _Stepping(Protocol):
    computing: bool
    later: list[Callable[[], None]]


_Engine = TypeVar("_Engine", bound=_Stepping)
_Arguments = ParamSpec("_Arguments")


def between_steps(
    change: Callable[Concatenate[_Engine, _Arguments], None],
) -> Callable[Concatenate[_Engine, _Arguments], None]:
    """Put a change of an engine off to the end of the step that it computes, if it computes one."""

    @functools.wraps(change)
    def put_off(engine: _Engine, /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> None:
        if engine.computing:
            engine.later.append(lambda: change(engine, *arguments, **named))
        else:
            change(engine, *arguments, **named)

    return put_off


class Signal:
    """A condition that wakes all waiters each time it fires."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def fire(self) -> None:
        """Wake the present waiters."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Return at the next `fire`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter
