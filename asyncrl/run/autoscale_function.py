"""The user's function that decides how many processes each pool has; it runs in a child process with a time limit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.child_pool.frames import CallFailed, Service, Setup
from asyncrl.functions import load_plain_function
from topics.actors import MOST_PROCESSES

_MEMORY_MB = 4096


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
    """Read its result: numbers of processes by pool, of some or all given pools.

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
