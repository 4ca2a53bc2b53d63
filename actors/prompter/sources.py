"""Prompt sources: where the groups that the prompter issues come from. A new one is a class and a row of `SOURCES`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol

from actors.prompter.state import PrompterState
from asyncrl.config.settings import Config
from topics.ids import REISSUE, TASK, WARMUP, Stage, prompt_name

TASK_ROWS = "task"


class Group(NamedTuple):
    """A group of trajectories that a source has for the prompter."""

    prompt_id: str
    stage: Stage
    size: int
    places: range  # of its rows in the endless order of the data
    origin: str = ""  # prompt whose row is issued again


class PromptSource(Protocol):
    """An origin of prompts, numbered in its own order.

    What it answers follows from the folded state alone, so that another process goes on in the same way.
    """

    letter: str  # first of its prompts' names
    stage: Stage
    share: float  # of the groups of its stage, relative to the other sources; math.inf: before all others

    def opened(self, data: str, rows_per_epoch: int | None) -> None:
        """Take note of how many rows some data has; None: they have no end."""

    def numbers(self, state: PrompterState) -> Iterable[int]:
        """Return the groups that it has and that are not wholly issued, in their order."""
        ...

    def group(self, state: PrompterState, number: int) -> Group:
        """Return one of its groups."""
        ...


class WarmupSource:
    """Rows that a teacher wrote, several to a trajectory."""

    letter, share = WARMUP, 1.0
    stage: Stage = "warmup"

    def __init__(self, config: Config) -> None:
        self._rows = config.warmup.rows_per_trajectory

    def opened(self, data: str, rows_per_epoch: int | None) -> None:
        """They are taken from one epoch after the other."""

    def numbers(self, state: PrompterState) -> Iterable[int]:
        """As many as the steps of the warm-up need: the stage ends with them."""
        return count(state.first(WARMUP))

    def group(self, state: PrompterState, number: int) -> Group:
        """One trajectory."""
        places = range(number * self._rows, (number + 1) * self._rows)
        return Group(prompt_name(WARMUP, number), "warmup", 1, places)


class TaskSource:
    """The rows of the task in the order of its data."""

    letter, share = TASK, 1.0
    stage: Stage = "rl"

    def __init__(self, config: Config) -> None:
        self._size, self._epochs = config.rollout.group_size, config.task.epochs
        self._end: int | None = None  # number of the first prompt that there is not

    def opened(self, data: str, rows_per_epoch: int | None) -> None:
        """Their end follows from the number of epochs."""
        if data == TASK_ROWS and self._epochs and rows_per_epoch:
            self._end = self._epochs * rows_per_epoch

    def numbers(self, state: PrompterState) -> Iterable[int]:
        """All up to the end of the data."""
        first = state.first(TASK)
        return count(first) if self._end is None else range(first, self._end)

    def group(self, state: PrompterState, number: int) -> Group:
        """All trajectories of one row."""
        return Group(prompt_name(TASK, number), "rl", self._size, range(number, number + 1))


class ReissueSource:
    """Prompts that an operator asked to issue again, before all new ones."""

    letter, share = REISSUE, math.inf
    stage: Stage = "rl"

    def __init__(self, config: Config) -> None:
        self._size = config.rollout.group_size

    def opened(self, data: str, rows_per_epoch: int | None) -> None:
        """Their rows were there before."""

    def numbers(self, state: PrompterState) -> Iterable[int]:
        """One for each request."""
        return range(state.first(REISSUE), len(state.origins))

    def group(self, state: PrompterState, number: int) -> Group:
        """The row of the prompt that was asked for."""
        origin = state.origins[number]
        return Group(prompt_name(REISSUE, number), "rl", self._size, places_again(origin), origin)


SOURCES: dict[str, Callable[[Config], PromptSource]] = {
    "warmup": WarmupSource,
    "task": TaskSource,
    "reissue": ReissueSource,
}


def places_again(origin: str) -> range:
    """The places of the row of a prompt of RL that is issued again."""
    return range(int(origin[1:]), int(origin[1:]) + 1)


def mixed(sources: Sequence[PromptSource], state: PrompterState, *, begin: dict[str, int]) -> Iterator[Group]:
    """The groups of several sources in the order of their issue.

    A group that was begun comes first. Then comes, each time, a group of the source with the fewest so far by its
    share: the order follows from how many each has issued, whenever that was.

    Args:
        begin: by letter, the number that a source of this run began with, where that is not 0.
    """
    groups = {source.letter: map(partial(source.group, state), source.numbers(state)) for source in sources}
    following = {letter: next(found, None) for letter, found in groups.items()}
    counts = {source.letter: state.first(source.letter) - begin.get(source.letter, 0) for source in sources}

    def turn(source: PromptSource) -> tuple[bool, float]:
        group = following[source.letter]
        return group is None or group.prompt_id not in state.members, (counts[source.letter] + 1) / source.share

    while ready := [source for source in sources if following[source.letter] is not None]:
        letter = min(ready, key=turn).letter
        group = following[letter]
        assert group is not None
        yield group
        counts[letter] += 1
        following[letter] = next(groups[letter], None)
