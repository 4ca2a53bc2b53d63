"""Prompt sources: where the groups that the prompter issues come from. A new one is a class and a row of `SOURCES`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import NamedTuple, Protocol

from actors.prompter.state import PrompterState
from asyncrl.config.settings import Config
from asyncrl.config.tasks import Mixture, rows_of
from asyncrl.data.sources import RowSetup
from topics.ids import EVALUATION, REISSUE, TASK, WARMUP, Stage, prompt_name
from topics.prompts import NO_ESTIMATOR, WARMUP_TASK

TASK_ROWS, HELD_OUT_ROWS = "task", "held-out"  # data of the prompter


class Group(NamedTuple):
    """A group of trajectories that a source has for the prompter, and the rules that hold for it."""

    prompt_id: str
    stage: Stage
    tasks: Sequence[str]  # whose rows it has; with `row_each` one for each member
    size: int
    places: range  # of its rows in the endless order of the data
    data: str = TASK_ROWS
    row_each: bool = False  # each member has a row of its own; else the first one carries those of the group
    min_version: int = 0  # of the weights that may sample it, where the bound on lag asks for no more
    temperature: float = 1.0
    estimator: str = NO_ESTIMATOR  # of its advantages
    origin: str = ""  # prompt whose row is issued again


class PromptSource(Protocol):
    """An origin of prompts, numbered in its own order.

    What it answers follows from the folded state alone, so that another process goes on in the same way.
    """

    letter: str  # first of its prompts' names
    stage: Stage  # open groups of `warmup` and `rl` count against the credit of that stage, those of `eval` do not
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
        return Group(prompt_name(WARMUP, number), "warmup", [WARMUP_TASK], 1, places)


class TaskSource:
    """The rows of the tasks, each in the order of its data, mixed by their shares."""

    letter, share = TASK, 1.0
    stage: Stage = "rl"

    def __init__(self, config: Config) -> None:
        self._rules, self._epochs = _Rules(config), config.task.epochs
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
        return self._rules(prompt_name(TASK, number), number)


class ReissueSource:
    """Prompts that an operator asked to issue again, before all new ones."""

    letter, share = REISSUE, math.inf
    stage: Stage = "rl"

    def __init__(self, config: Config) -> None:
        self._rules = _Rules(config)

    def opened(self, data: str, rows_per_epoch: int | None) -> None:
        """Their rows were there before."""

    def numbers(self, state: PrompterState) -> Iterable[int]:
        """One for each request."""
        return range(state.first(REISSUE), len(state.origins))

    def group(self, state: PrompterState, number: int) -> Group:
        """The row of the prompt that was asked for."""
        origin = state.origins[number]
        return self._rules(prompt_name(REISSUE, number), place_again(origin), origin=origin)


class HeldOutSource:
    """Evaluations: each is a group, and its members are the first held-out rows."""

    letter, share = EVALUATION, 1.0
    stage: Stage = "eval"

    def __init__(self, config: Config) -> None:
        self._rows: int | None = None
        mixture = Mixture(config)
        self._tasks_of = lru_cache(maxsize=1)(lambda size: [mixture.task(place).name for place in range(size)])

    def opened(self, data: str, rows_per_epoch: int | None) -> None:
        """No evaluation has more prompts than there are held-out rows."""
        if data == HELD_OUT_ROWS:
            self._rows = rows_per_epoch

    def numbers(self, state: PrompterState) -> Iterable[int]:
        """The evaluations that were asked for."""
        return sorted(state.evaluations)

    def group(self, state: PrompterState, number: int) -> Group:
        """All prompts of one evaluation, for the version that was asked for or a newer one."""
        version, prompts, temperature = state.evaluations[number]
        size = min(prompts, self._rows or prompts)
        return Group(
            prompt_name(EVALUATION, number),
            "eval",
            self._tasks_of(size),
            size,
            range(size),
            data=HELD_OUT_ROWS,
            row_each=True,
            min_version=version,
            temperature=temperature,
        )


SOURCES: dict[str, Callable[[Config], PromptSource]] = {
    "warmup": WarmupSource,
    "task": TaskSource,
    "reissue": ReissueSource,
    "held-out": HeldOutSource,
}


def data_of(config: Config, base: Path) -> dict[str, RowSetup]:
    """The data of a run by the name that groups refer to.

    Args:
        base: folder of the config's relative paths.
    """
    found = {TASK_ROWS: rows_of(config, base)}
    if config.eval.prompts:
        found[HELD_OUT_ROWS] = rows_of(config, base, held_out=True)
    return found


class _Rules:
    """Make groups of RL by the settings of the task that has their row."""

    def __init__(self, config: Config) -> None:
        self._mixture = Mixture(config)

    def __call__(self, prompt_id: str, place: int, *, origin: str = "") -> Group:
        task = self._mixture.task(place)
        return Group(
            prompt_id,
            "rl",
            [task.name],
            task.group_size,
            range(place, place + 1),
            temperature=task.temperature,
            estimator=task.advantage,
            origin=origin,
        )


def place_again(origin: str) -> int:
    """The place of the row of a prompt of RL that is issued again."""
    return int(origin[1:])


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
