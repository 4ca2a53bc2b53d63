"""Rows of environments with episodes: each is a problem by its seed, and the first observation is the prompt."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from asyncrl.environments.protocol import EnvironmentKind, Problem, draw
from topics.prompts import PromptRow


class ProblemRows:
    """Problems without end. See `asyncrl.environments.protocol.Environment`."""

    rows_per_epoch: int | None = None

    def __init__(self, kind: EnvironmentKind, problem: Problem, base: Path) -> None:
        """
        Args:
            problem: with the seed of the rows.
        """
        self._kind, self._problem, self._base = kind, problem, base

    def row(self, index: int) -> PromptRow:
        """The row at place `index`."""
        given = self._problem
        seed = draw(f"{given.kind}:{given.name}", given.seed, index, 2**31)
        return asyncio.run(self._first(Problem(given.kind, given.name, seed, given.parameters)))

    async def _first(self, problem: Problem) -> PromptRow:
        episode = self._kind.episode(problem, self._base)
        try:
            return problem.row(await episode.reset(), episode.tools)
        finally:
            await episode.close()

    def describe(self) -> str:
        """The environment and its parameters."""
        parameters = "".join(f", {name}={value}" for name, value in self._problem.parameters.items())
        return f"{self._problem.kind} {self._problem.name}{parameters}"

    def score(self, completion: str, row: PromptRow) -> float:
        """An episode gives the rewards, not this."""
        kind = self._problem.kind
        raise NotImplementedError(f"an environment of kind {kind} scores no answers: its episodes give the rewards")


def parameters_of(parameters: dict[str, Any]) -> str:
    """Return parameters as words of a call."""
    return ", ".join(f"{name}={value!r}" for name, value in parameters.items())
