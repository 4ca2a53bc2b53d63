"""The harness `python`: an async function of the user, such as one that runs an agent framework."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from asyncrl.child_pool.frames import Service, Setup
from asyncrl.config.harness_settings import PythonSettings
from asyncrl.errors import EnvironmentFault, FunctionError, last_lines
from asyncrl.functions import is_async, load_function
from asyncrl.harnesses.harness import Attempt, Harness, HarnessFailed, HarnessKind

_GIVEN = ("row", "base_url", "api_key", "sandbox", "tools")


class Python:
    """See `asyncrl.harnesses.harness.Harness`."""

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function
        self._names = [name for name in inspect.signature(function).parameters if name in _GIVEN]

    async def run(self, attempt: Attempt) -> None:
        endpoint = attempt.endpoint
        values = (attempt.row, endpoint.base_url, endpoint.api_key, attempt.sandbox, attempt.tools)
        given = dict(zip(_GIVEN, values, strict=True))
        try:
            said = await self._function(**{name: given[name] for name in self._names})
        except EnvironmentFault:
            raise
        except Exception as error:  # any exception of a user's agent is a crash of the program
            raise HarnessFailed(last_lines(error)) from error
        if said is not None:
            attempt.context.completion = str(said)


def load_only(spec: str, base: str) -> Service:
    """Load the function of an agent, which runs elsewhere.

    Raises:
        FunctionError: see `load_agent`.
    """
    return Service(load_agent(spec, Path(base)))


def load_agent(spec: str, base: Path) -> Callable[..., Awaitable[Any]]:
    """Import the function of an agent.

    Raises:
        FunctionError: there is none, it is not async, or it takes what an attempt does not have.
    """
    function = load_function(spec, base=base)
    name = spec.rpartition(":")[2]
    if not is_async(inspect.unwrap(function)):
        raise FunctionError(f"{spec}: it is no async function; write async def {name}(row, base_url, api_key)")
    parameters = inspect.signature(function).parameters.values()
    if unknown := [one.name for one in parameters if one.name not in _GIVEN and one.default is one.empty]:
        raise FunctionError(f"{spec}: it takes {', '.join(unknown)}; an agent may take {', '.join(_GIVEN)}")
    return function


class _Kind(HarnessKind):
    """See `asyncrl.harnesses.harness.HarnessKind`."""

    def make(self, settings: PythonSettings, base: Path) -> Harness:
        return Python(load_agent(settings.function, base))

    def setup(self, settings: PythonSettings, base: Path, limit_s: float) -> Setup | None:
        return Setup(
            settings.function, f"{__name__}:load_only", {"spec": settings.function, "base": str(base)}, limit_s
        )


KIND = _Kind()
