"""Environments of kind `verifiers`: tasksets of verifiers 0.4, in a separate Python.

A task scores a reply (`reward.function = "verifiers"`), or plays its own episode with the policy as its model
(`task.rollout = "environment"`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.environments.protocol import DataError, Environment, EnvironmentKind, Played, Problem
from asyncrl.environments.verifiers.process import VerifiersOptions, process_of, read_options
from asyncrl.epochs import row_at
from asyncrl.errors import EnvironmentFault
from topics.prompts import PromptRow

_SCORE_LIMIT_S = 600.0
_numbers = itertools.count()


class Verifiers:
    """A taskset. See `asyncrl.environments.protocol.Environment`."""

    def __init__(self, name: str, options: VerifiersOptions, seed: int) -> None:
        self._name, self._options, self._seed = name, options, seed
        self.rows_per_epoch: int | None = process_of(name, options).count
        if self.rows_per_epoch == 0:
            raise DataError(f"verifiers:{name} has no task")

    def row(self, index: int) -> PromptRow:
        """The row at place `index`: every epoch has each task of a finite taskset once."""
        number = index
        if self.rows_per_epoch is not None:
            number = row_at(index, self.rows_per_epoch, self._seed)
        found = process_of(self._name, self._options).ask("row", number)
        parameters = msgspec.to_builtins(self._options)
        problem = Problem("verifiers", self._name, number, parameters)
        metadata = {"environment": msgspec.to_builtins(problem), "source_dataset": self._name}
        return PromptRow(found["messages"], metadata=metadata | {"source_options": parameters})

    def describe(self) -> str:
        """The taskset and its number of tasks."""
        return f"verifiers {self._name}: {self.rows_per_epoch or 'endless'} tasks"

    def score(self, completion: str, row: PromptRow) -> float:
        """Return the sum of the weighted rewards of the task, which sees one reply to its prompt."""
        number = Problem.of(row).seed
        found = process_of(self._name, self._options).ask("score", number, completion, limit_s=_SCORE_LIMIT_S)
        return float(found["reward"])


class _Kind(EnvironmentKind):
    """See `asyncrl.environments.protocol.EnvironmentKind`."""

    def make(self, name: str, parameters: dict[str, Any], seed: int, base: Path) -> Environment:
        return Verifiers(name, read_options(name, parameters, base), seed)

    async def play(self, problem: Problem, base_url: str, api_key: str) -> Played:
        options = read_options(problem.name, problem.parameters, Path())
        process = await asyncio.to_thread(process_of, problem.name, options)
        variable = f"ASYNCRL_KEY_{os.getpid()}_{next(_numbers)}"
        found = await process.ask_async("run", problem.seed, base_url, api_key, variable)
        if found["fault"]:
            raise EnvironmentFault(f"verifiers:{problem.name}: {found['fault']}")
        return Played(found["reward"], found["metrics"], found["reply"], found["failure"])

    def limit_s(self, problem: Problem) -> float:
        return read_options(problem.name, problem.parameters, Path()).limit_s


KIND = _Kind()
