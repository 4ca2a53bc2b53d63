"""Environments of kind `text`: a user's class with `reset` and `step` over text, as those of gymnasium."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from asyncrl.environments.problems import ProblemRows, parameters_of
from asyncrl.environments.protocol import DataError, Environment, EnvironmentKind, Observation, Problem, Step
from asyncrl.errors import FunctionError
from asyncrl.functions import load_function

_METHODS = ("reset", "step")


class TextEpisode:
    """An object of the user's class; its methods run in a thread. See `asyncrl.environments.protocol.Episode`."""

    def __init__(self, name: str, played: Any, seed: int) -> None:
        self._name, self._played, self._seed = name, played, seed
        self.tools: list[dict[str, Any]] = list(getattr(played, "tools", ()))

    async def reset(self) -> Observation:
        found = await asyncio.to_thread(self._played.reset, seed=self._seed)
        return _observation(self._name, "reset", found[0] if isinstance(found, tuple) else found)

    async def step(self, reply: str) -> Step:
        found = await asyncio.to_thread(self._played.step, reply)
        if not isinstance(found, tuple) or len(found) != 5:
            expected = "expected observation, reward, terminated, truncated and info"
            raise FunctionError(f"text:{self._name}: step returned {str(found)[:80]!r}; {expected}")
        observation, reward, terminated, truncated, _ = found
        return Step(_observation(self._name, "step", observation), float(reward), bool(terminated or truncated))

    async def close(self) -> None:
        if callable(close := getattr(self._played, "close", None)):
            await asyncio.to_thread(close)


def _observation(name: str, method: str, found: Any) -> Observation:
    if isinstance(found, str) or (isinstance(found, list) and all(isinstance(one, dict) for one in found)):
        return found
    raise FunctionError(f"text:{name}: {method} returned {type(found).__name__}; expected text or a list of messages")


class _Kind(EnvironmentKind):
    """See `asyncrl.environments.protocol.EnvironmentKind`."""

    def make(self, name: str, parameters: dict[str, Any], seed: int, base: Path) -> Environment:
        problem = Problem("text", name, seed, parameters)
        self.episode(problem, base)
        return ProblemRows(self, problem, base)

    def episode(self, problem: Problem, base: Path) -> TextEpisode:
        name = problem.name
        try:
            made = load_function(name, base=base)
        except FunctionError as error:
            raise DataError(f"text:{name}: {error}") from error
        if missing := [method for method in _METHODS if not callable(getattr(made, method, None))]:
            raise DataError(
                f"text:{name} has no method {missing[0]}; expected a class with reset(seed=) and step(text)"
            )
        try:
            return TextEpisode(name, made(**problem.parameters), problem.seed)
        except TypeError as error:
            raise DataError(f"text:{name}({parameters_of(problem.parameters)}): {error}; see task.options") from error


KIND = _Kind()
