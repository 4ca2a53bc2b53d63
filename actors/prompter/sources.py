"""Prompt sources, and the state that they read. A new one is a class and a row of `SOURCES`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec

from asyncrl.config.held_out import held_out_rows, held_out_sets
from asyncrl.config.live_settings import estimator_of
from asyncrl.config.settings import Config
from asyncrl.config.staged import Ended
from asyncrl.config.tasks import Begun, Mixture, curricula_of, mastery_of, rows_of, warmup_rows
from asyncrl.data.curriculum import Climb, at_level, level_of
from asyncrl.data.mastery import Mastered, MasteryRule
from asyncrl.data.sources import RowSetup
from asyncrl.live.rows import live_rows
from topics.evals import EvalRequested
from topics.ids import EVALUATION, LIVE, REISSUE, TASK, WARMUP, Stage, number_of, prompt_name
from topics.prompts import LIVE_TASK, NO_ESTIMATOR, WARMUP_TASK, PromptRow
from topics.turns import TurnAdmitted


class PrompterState(msgspec.Struct):
    """The whole state, which snapshots hold. A field whose meaning changes gets another name."""

    first_open: dict[str, int]  # by letter: number of the first prompt that is not wholly issued
    done: dict[Stage, int]  # trained batches
    trained: int  # newest step
    members: dict[str, int] = {}  # issued members of groups not yet complete
    open: dict[Stage, set[str]] = msgspec.field(default_factory=lambda: {"warmup": set(), "rl": set()})
    closed_early: set[str] = set()  # ends read before the issue they end: logs have no common order
    packed: dict[int, list[str]] = {}
    again: dict[str, int] = {}  # trajectories to issue again, with the attempt
    attempts: dict[str, int] = {}  # newest attempt issued of open groups' trajectories, where above 0
    trained_ahead: set[int] = set()  # trained before their packing was read
    requests: dict[int, EvalRequested] = {}  # evaluations by number, not wholly issued
    evaluated: int = -1  # number of the newest evaluation that was asked for
    live: dict[int, TurnAdmitted] = {}  # turns of live traffic by number, not issued yet
    live_admitted: int = 0  # turns
    origins: list[str] = []  # prompts whose rows are to be issued again, in the order of the requests
    finished_at: int | None = None  # step at which training was reported finished
    paused: bool = False  # payload streams are nearly full
    ended: int = 0  # groups of the tasks that the buffer packed or dropped
    stages: list[Begun] = []  # of the data, in their order
    stage_asked: tuple[int, str] = (0, "")  # the newest request of one: its sequence and the name
    stage_answered: int = 0  # sequence of the newest request that was recorded
    ended_of_stages: Ended = msgspec.field(default_factory=Ended)  # what conditions of stages look at
    mastered: Mastered = msgspec.field(default_factory=Mastered)  # rows, where mastered ones leave the order
    graded: list[tuple[int, list[float], int]] = []  # groups that are not in it yet: the number of rows is not known
    climbs: dict[str, Climb] = {}  # difficulties by task, of the tasks with a rising difficulty

    def first(self, letter: str) -> int:
        """Number of the first prompt with this letter that is not wholly issued."""
        return self.first_open.get(letter, 0)


TASK_ROWS, WARMUP_ROWS = "task", "warmup"  # data of the prompter; each held-out set has its own


class Group(NamedTuple):
    """A group of trajectories that a source has for the prompter, and the rules that hold for it."""

    prompt_id: str
    stage: Stage
    tasks: Sequence[str]  # whose rows it has; with `row_each` one for each member
    size: int
    places: range  # of its rows in the endless order of the data
    data: str = TASK_ROWS
    row_each: bool = False  # each message carries its row; else the first one carries those of the group
    samples: int = 1  # with `row_each`: members, one after the other, of the same row
    min_version: int = 0  # of the weights that may sample it, where the bound on lag asks for no more
    temperature: float = 1.0
    estimator: str = NO_ESTIMATOR  # of its advantages
    origin: str = ""  # prompt whose row is issued again
    given: Sequence[PromptRow] = ()  # rows that are of no data, one for each member
    secrets: str = ""  # data keys that reading its trajectories takes
    wanted: int = 0  # members that are trained, where more are issued

    @property
    def level(self) -> int:
        """Level of the difficulty of its rows."""
        return level_of(self.places.start)


class PromptSource:
    """An origin of prompts, numbered in its own order.

    Its answers follow from the folded state alone, so that another process continues in the same way.
    """

    letter: str  # first of its prompts' names
    stage: Stage = "rl"  # open groups of `warmup` and `rl` count against the credit of that stage, of `eval` not
    share: float = 1.0  # of the groups of its stage, relative to the other sources; math.inf: before all others

    def opened(self, data: str, rows_per_epoch: int | None) -> None:
        """Take note of how many rows some data has; None: they have no end."""

    def numbers(self, state: PrompterState) -> Iterable[int]:
        """Return the groups that it has and that are not wholly issued, in their order."""
        raise NotImplementedError

    def group(self, state: PrompterState, number: int) -> Group:
        """Return one of its groups."""
        raise NotImplementedError


class WarmupSource(PromptSource):
    """Rows that a teacher wrote, several to a trajectory."""

    letter, stage = WARMUP, "warmup"

    def __init__(self, config: Config) -> None:
        self._rows = config.warmup.rows_per_trajectory
        self._data = WARMUP_ROWS if config.warmup.source else TASK_ROWS

    def numbers(self, state: PrompterState) -> Iterable[int]:
        """As many as the steps of the warm-up need: the stage ends with them."""
        return count(state.first(WARMUP))

    def group(self, state: PrompterState, number: int) -> Group:
        places = range(number * self._rows, (number + 1) * self._rows)
        return Group(prompt_name(WARMUP, number), "warmup", [WARMUP_TASK], 1, places, data=self._data)


class TaskSource(PromptSource):
    """The rows of the tasks, each in the order of its data, mixed by their shares."""

    letter = TASK

    def __init__(self, config: Config) -> None:
        self._rules, self._epochs = _Rules(config), config.task.epochs
        self._end = 0 if config.live.fraction == 1 else None  # number of the first prompt that there is not

    def opened(self, data: str, rows_per_epoch: int | None) -> None:
        """Their end follows from the number of epochs."""
        self._rules.opened(data, rows_per_epoch)
        if data == TASK_ROWS and self._epochs and rows_per_epoch and self._end is None:
            self._end = self._epochs * rows_per_epoch

    def numbers(self, state: PrompterState) -> Iterable[int]:
        """All up to the end of the data."""
        first = state.first(TASK)
        return count(first) if self._end is None else range(first, self._end)

    def group(self, state: PrompterState, number: int) -> Group:
        return self._rules(prompt_name(TASK, number), number, state)


class ReissueSource(PromptSource):
    """Prompts that an operator asked to issue again, before all new ones."""

    letter, share = REISSUE, math.inf

    def __init__(self, config: Config) -> None:
        self._rules = _Rules(config)

    def opened(self, data: str, rows_per_epoch: int | None) -> None:
        """The number of rows belongs to the rule of mastered ones."""
        self._rules.opened(data, rows_per_epoch)

    def numbers(self, state: PrompterState) -> Iterable[int]:
        return range(state.first(REISSUE), len(state.origins))

    def group(self, state: PrompterState, number: int) -> Group:
        """The row of the prompt that was asked for."""
        origin = state.origins[number]
        return self._rules(prompt_name(REISSUE, number), number_of(origin), state, origin=origin)


class LiveSource(PromptSource):
    """Turns of live traffic, in the order in which the keeper of sessions admitted them."""

    letter = LIVE

    def __init__(self, config: Config) -> None:
        share = config.live.fraction
        self.share = math.inf if share == 1 else share / (1 - share)  # relative to 1 for the tasks
        method = config.live.method
        self._alone, self._together = estimator_of(method, config.live.advantage), estimator_of(method, "rloo")

    def numbers(self, state: PrompterState) -> Iterable[int]:
        """The admitted turns; empty if the run does not train on live turns."""
        return range(state.first(LIVE), state.live_admitted) if self.share else ()

    def group(self, state: PrompterState, number: int) -> Group:
        """A turn with its siblings, whose trajectories are there already."""
        turn = state.live[number]
        rows = live_rows(turn)
        return Group(
            prompt_name(LIVE, number),
            "rl",
            [LIVE_TASK],
            len(rows),
            range(0),
            temperature=turn.temperature,
            estimator=self._alone if len(rows) == 1 else self._together,
            given=rows,
            secrets=turn.secrets,
        )


class HeldOutSource(PromptSource):
    """Evaluations: each is a group, and its members are answers to the first rows of a held-out set."""

    letter, stage = EVALUATION, "eval"

    def __init__(self, config: Config) -> None:
        self._rows: dict[str, int | None] = {}  # by data
        self._sets = held_out_sets(config)
        mixture = Mixture(config)
        self._tasks_of = lru_cache(maxsize=1)(lambda prompts: [mixture.task(place).name for place in range(prompts)])

    def opened(self, data: str, rows_per_epoch: int | None) -> None:
        """No evaluation has more prompts than there are held-out rows."""
        self._rows[data] = rows_per_epoch

    def numbers(self, state: PrompterState) -> Iterable[int]:
        return sorted(state.requests)

    def group(self, state: PrompterState, number: int) -> Group:
        """All answers of one evaluation, for the version that was asked for or a newer one."""
        request = state.requests[number]
        held_out = self._sets[request.dataset]
        prompts = min(request.prompts, self._rows.get(held_out.data) or request.prompts)
        tasks = [held_out.name] * prompts if held_out.name else self._tasks_of(prompts)
        return Group(
            prompt_name(EVALUATION, number),
            "eval",
            tasks,
            prompts * request.samples,
            range(prompts),
            data=held_out.data,
            row_each=True,
            samples=request.samples,
            min_version=request.version,
            temperature=request.temperature,
        )


SOURCES: dict[str, Callable[[Config], PromptSource]] = {
    "warmup": WarmupSource,
    "task": TaskSource,
    "reissue": ReissueSource,
    "live": LiveSource,
    "held-out": HeldOutSource,
}


def data_of(config: Config, base: Path) -> dict[str, RowSetup]:
    """The data of a run by the name that groups refer to."""
    found = {TASK_ROWS: rows_of(config, base)}
    if (own := warmup_rows(config, base)) is not None:
        found[WARMUP_ROWS] = own
    for name, held_out in held_out_sets(config).items():
        found[held_out.data] = held_out_rows(config, base, name)
    return found


class _Rules:
    """Make groups of RL by the settings of the task that has their row."""

    def __init__(self, config: Config) -> None:
        self._mixture = Mixture(config)
        self._curricula = curricula_of(config)
        self._further, self._config = config.rollout.oversample, config
        self._mastery: MasteryRule | None = None

    def opened(self, data: str, rows_per_epoch: int | None) -> None:
        """Take note of how many rows the tasks have."""
        if data == TASK_ROWS:
            self._mastery = mastery_of(self._config, rows_per_epoch)

    def __call__(self, prompt_id: str, number: int, state: PrompterState, *, origin: str = "") -> Group:
        task = self._mixture.task(number, state.stages)
        rule = self._curricula.get(task.name)
        level = rule.level(state.climbs.get(task.name, Climb()), number) if rule else 0
        place = at_level(self._mixture.place(number, state.stages), level)
        if self._mastery is not None:
            place = self._mastery.place(state.mastered, place)
        return Group(
            prompt_id,
            "rl",
            [task.name],
            task.group_size + self._further,
            range(place, place + 1),
            temperature=task.temperature,
            estimator=task.advantage,
            origin=origin,
            wanted=task.group_size if self._further else 0,
        )


def mixed(sources: Sequence[PromptSource], state: PrompterState, *, begin: dict[str, int]) -> Iterator[Group]:
    """The groups of several sources in the order of their issue.

    A group that was begun comes first. Then comes, each time, a group of the source with the fewest so far by its
    share: the order follows from how many each has issued, whenever that was.

    Args:
        begin: by letter, the number that a source of this run began with, if that is not 0.
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
