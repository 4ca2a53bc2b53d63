"""The user's function that decides how many processes each pool has; it runs in a child process with a time limit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.functions import load_plain_function
from asyncrl.sandbox.frames import CallFailed, Service, Setup
from asyncrl.sandbox.pool import Sandbox
from topics.actors import MOST_PROCESSES

_MEMORY_MB = 4096


class AutoscaleFunction:
    """Calls the function, and starts its process again where that has ended."""

    def __init__(self, spec: str, *, base: Path, limit_s: float) -> None:
        self._setup = autoscale_setup(spec, base=base, limit_s=limit_s)
        self._sandbox: Sandbox | None = None

    async def call(self, loads: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        """Return the numbers of processes that it answers, by pool.

        Args:
            loads: by pool, as `PoolLoad.plain` gives them.

        Raises:
            FunctionError: it cannot be loaded.
            CallFailed: it raised, took too long or returned something else.
        """
        if self._sandbox is None:
            self._sandbox = await Sandbox.open(self._setup, workers=1)
        reply = await self._sandbox.call(dict(loads))
        if reply.reason is not None:
            raise CallFailed(reply.reason, reply.detail)
        return dict(reply.value)

    async def close(self) -> None:
        """Kill its process."""
        if self._sandbox is not None:
            await self._sandbox.close()


def autoscale_setup(spec: str, *, base: Path, limit_s: float) -> Setup:
    """Return the setup by which a child loads the function."""
    return Setup(spec, f"{__name__}:serve_autoscale", {"spec": spec, "base": str(base)}, limit_s, _MEMORY_MB)


def serve_autoscale(spec: str, base: str) -> Service:
    """Load the function.

    Raises:
        FunctionError: it cannot be found or loaded, or is async.
    """
    function = load_plain_function(spec, base=Path(base), argument="pools")
    return Service(functools.partial(_call, function), _counts)


def _call(function: Callable[..., Any], pools: dict[str, Any]) -> tuple[Any, list[str]]:
    return function(pools), list(pools)


def _counts(answer: tuple[Any, list[str]]) -> dict[str, int]:
    """Read what it returned: numbers of processes by pool, of some or all that it was given.

    Raises:
        CallFailed: with reason `value`.
    """
    value, pools = answer
    good = isinstance(value, Mapping) and all(
        pool in pools and isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= MOST_PROCESSES
        for pool, count in value.items()
    )
    if not good:
        words = f"it returned {repr(value)[:200]}; expected whole numbers from 0 to {MOST_PROCESSES} by pool"
        raise CallFailed("value", f"{words}, of {', '.join(pools)}")
    return dict(value)
