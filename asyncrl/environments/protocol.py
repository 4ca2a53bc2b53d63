"""The protocols of task data and of environments: prompts by number, and the score of an answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from asyncrl.errors import AsyncRLError
from topics.prompts import PromptRow


class DataError(AsyncRLError):
    """Data that cannot serve as the prompts of a task."""

    fatal = True


class DataSource(Protocol):
    """Rows of a task in a seeded order without end."""

    rows_per_epoch: int | None  # None where every row is new

    def row(self, index: int) -> PromptRow:
        """The row at place `index` = 0, 1, 2, ... of the order; a pure function of the source and its seed."""

    def describe(self) -> str:
        """Describe the rows in one line."""


class Environment(DataSource, Protocol):
    """A named task, made from its parameters and a seed.

    The metadata of each row has its name as `source_dataset`, and its parameters as `source_options` if there are any;
    or, in a kind with episodes, its `Problem` as `environment`.
    """

    def score(self, completion: str, row: PromptRow) -> float:
        """Return the reward in [0, 1] of an answer to a row, also to a row of another seed.

        Raises:
            NotImplementedError: the kind scores no answers.
        """


Observation: TypeAlias = str | list[dict[str, Any]]
"""Text, or chat messages."""


class Problem(msgspec.Struct, omit_defaults=True):
    """All by which any worker makes the problem of a row again."""

    kind: str
    name: str
    seed: int = 0  # of the problem
    parameters: dict[str, Any] = {}

    @classmethod
    def of(cls, row: PromptRow) -> Problem:
        """Read the problem of a row.

        Raises:
            DataError: the row has none.
        """
        try:
            return msgspec.convert(row.metadata.get("environment"), cls)
        except msgspec.ValidationError as error:
            words = "the metadata of the row have no problem of an environment"
            raise DataError(f"{words}; take the rows from an environment with episodes: {error}") from error

    def row(self, observation: Observation, tools: list[dict[str, Any]]) -> PromptRow:
        """Return the row of this problem, whose prompt is the first observation."""
        metadata: dict[str, Any] = {"environment": msgspec.to_builtins(self)}
        return PromptRow(observation, metadata=metadata | ({"tools": tools} if tools else {}))


class Step(NamedTuple):
    """The answer of an environment to a reply."""

    observation: Observation
    reward: float
    done: bool


class Episode(Protocol):
    """One problem in progress. Equal replies to an equal problem give equal steps."""

    tools: list[dict[str, Any]]  # descriptions for the chat template

    async def reset(self) -> Observation:
        """Begin the problem, and return its first observation.

        Raises:
            EnvironmentFault: a server that the environment needs failed.
        """

    async def step(self, reply: str) -> Step:
        """Take a reply of the policy.

        Raises:
            EnvironmentFault: a server that the environment needs failed.
        """

    async def close(self) -> None:
        """Free what the episode holds."""


class Played(NamedTuple):
    """The result of a program that worked on a problem with the policy as its model."""

    reward: float
    metrics: dict[str, float]
    reply: str  # the last one
    failure: str  # why the program failed; empty if it did not


class EnvironmentKind:
    """A kind of environments. `episode`, or `play` and `limit_s`, are of kinds with that capability."""

    def make(self, name: str, parameters: dict[str, Any], seed: int, base: Path) -> Environment:
        """Make an environment. See `asyncrl.environments.kinds.make`."""
        raise NotImplementedError

    def episode(self, problem: Problem, base: Path) -> Episode:
        """Open the problem of a row.

        Raises:
            DataError: it cannot be made.
        """
        raise NotImplementedError

    async def play(self, problem: Problem, base_url: str, api_key: str) -> Played:
        """Let the environment's program work on a problem, with the policy at an address.

        Raises:
            EnvironmentFault: the environment failed, not the program.
        """
        raise NotImplementedError

    def limit_s(self, problem: Problem) -> float:
        """Return the seconds of a program, without those in which it waits for the policy."""
        raise NotImplementedError


def check_options(spec: str, options: dict[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return `options` when all of them are known.

    Raises:
        DataError: names the unknown ones and the known ones.
    """
    names = sorted(known)
    unknown = [name for name in options if name not in names]
    if unknown:
        raise DataError(
            f"data {spec!r} has no option {', '.join(unknown)}; it takes {', '.join(names)}. A set of [eval.sets.NAME] "
            "has the options of [task] unless it has its own, such as options = {}"
        )
    return options


def draw(what: str, seed: int, index: int, below: int) -> int:
    """A whole number in [0, below) that depends on nothing but the arguments; below may be up to 2**448."""
    digest = hashlib.blake2b(f"{what}:{seed}:{index}".encode()).digest()
    return int.from_bytes(digest, "little") % below
