"""The protocols of task data and of environments: prompts by number, and the score of an answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol

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
    """A task that scores answers to its rows, also to rows of another seed.

    The metadata of each row has its name as `source_dataset`, and its parameters as `source_options` if there are any.
    """

    def score(self, completion: str, row: PromptRow) -> float:
        """Return the reward in [0, 1] of an answer to a row."""


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
