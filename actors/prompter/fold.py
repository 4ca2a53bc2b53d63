"""The fold of the prompter, a pure function of messages: which groups are open, and how many more may be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from topics.actors import REISSUE_REQUESTED
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.groups import GROUP_DROPPED
from topics.prompts import PROMPT_ISSUED, Stage, prompt_name, reissue_name
from topics.streams import ADMISSION_PAUSED, ADMISSION_RESUMED
from topics.topic import Topic
from topics.trajectories import TRAJECTORY_DROPPED
from topics.weights import TRAINING_FINISHED

_PROMPT = re.compile(r"p\d{6,}")


class Wanted(NamedTuple):
    """A group member to be issued."""

    stage: Stage
    number: int  # of the prompt in its source's endless order
    member: int
    group_size: int
    min_version: int
    attempt: int = 0
    origin: str = ""  # prompt whose row is issued again; `number` is then that of the request

    @property
    def prompt_id(self) -> str:
        """`p000042`."""
        return reissue_name(self.number) if self.origin else prompt_name(self.stage, self.number)

    @property
    def carries_rows(self) -> bool:
        """Return whether its message carries the rows of its group: one does, once."""
        return self.member == 0 and self.attempt == 0

    def rows(self, rows_per_trajectory: int) -> range:
        """Places of its rows in the source's endless order; a supervised trajectory has so many."""
        if self.stage == "warmup":
            return range(self.number * rows_per_trajectory, (self.number + 1) * rows_per_trajectory)
        row = int(self.origin[1:]) if self.origin else self.number
        return range(row, row + 1)


class StagePlan(NamedTuple):
    """The number of groups of a stage."""

    group_size: int
    batch_groups: int
    steps: int


def stage_plans(config: Config) -> dict[Stage, StagePlan]:
    """The stages of a run and their sizes."""
    return {
        "warmup": StagePlan(1, config.warmup.batch_rows // config.warmup.rows_per_trajectory, config.warmup.steps),
        "rl": StagePlan(config.rollout.group_size, config.buffer.batch_groups, config.learner.steps),
    }


class PrompterState(msgspec.Struct):
    """The whole state as plain data, which snapshots hold. A field whose meaning changes gets another name."""

    issued: dict[Stage, int]  # groups whose every member is issued
    done: dict[Stage, int]  # trained batches
    trained: int  # newest step
    members: dict[str, int] = {}  # issued members of groups not yet complete
    open: dict[Stage, set[str]] = msgspec.field(default_factory=lambda: {"warmup": set(), "rl": set()})
    closed_early: set[str] = set()  # ends read before the issue they end: logs have no common order
    packed: dict[int, list[str]] = {}
    again: dict[str, int] = {}  # trajectories to issue again, with the attempt
    attempts: dict[str, int] = {}  # newest attempt issued of open groups' trajectories, where above 0
    trained_ahead: set[int] = set()  # trained before their packing was read
    origins: list[str] = []  # prompts whose rows are to be issued again, in the order of the requests
    reissued: set[int] = set()  # requests whose every member is issued
    finished_at: int | None = None  # step at which training was reported finished
    paused: bool = False  # payload streams are nearly full


class PrompterFold:
    """Open groups are those issued, and neither in a distinct trained batch nor dropped; each returns one credit."""

    def __init__(self, config: Config, end: int | None = None) -> None:
        """
        Args:
            end: number of the first prompt of RL that there is not; None where there is no end.
        """
        self.end = end
        self._plans = stage_plans(config)
        self._max_lag = config.buffer.max_lag
        self.state = PrompterState(
            issued={"warmup": 0, "rl": config.start.prompt},
            done={"warmup": 0, "rl": config.start.step},
            trained=config.origin,
        )

    def apply(self, topic: Topic[Any], message: Any, record: Record) -> None:
        """Fold one message in. Issues are read by their headers alone."""
        if topic is PROMPT_ISSUED:
            self._on_issued(record.headers)
        elif topic is BATCH_PACKED:
            groups = [group.prompt_id for group in message.groups]
            if message.step in self.state.trained_ahead:
                self.state.trained_ahead.discard(message.step)
                self._close(groups)
            else:
                self.state.packed[message.step] = groups
        elif topic is BATCH_TRAINED:
            if message.step <= self.state.trained:
                return  # trained again after a rollback: its groups returned their credit already
            self.state.trained = message.step
            self.state.done[message.stage] += 1
            groups_or_none = self.state.packed.pop(message.step, None)
            if groups_or_none is None:
                self.state.trained_ahead.add(message.step)
            else:
                self._close(groups_or_none)
        elif topic is GROUP_DROPPED:
            self._close([message.prompt_id])
        elif topic is TRAJECTORY_DROPPED:
            attempt = message.attempt + 1
            if message.again and self.state.attempts.get(message.trajectory_id, 0) < attempt:
                self.state.again[message.trajectory_id] = attempt
        elif topic is REISSUE_REQUESTED:
            self._on_reissue(message.prompt_id)
        elif topic is TRAINING_FINISHED:
            self.state.finished_at = message.step
        elif topic is ADMISSION_PAUSED or topic is ADMISSION_RESUMED:
            self.state.paused = topic is ADMISSION_PAUSED

    def wanted(self) -> list[Wanted]:
        """Return the messages that may be issued now, in order."""
        if self.state.finished_at is not None and self.state.finished_at >= self._plans["rl"].steps:
            return []
        again = [self._wanted_again(name, attempt) for name, attempt in self.state.again.items()]
        # RL waits for version 0 in the slots of the rollout workers. Issued before every batch of the warm-up is
        # packed, it would keep them from what replaces a failed warm-up trajectory: no version 0 would ever come.
        packed = self.state.done["warmup"] + sum(step <= 0 for step in self.state.packed)
        warm = packed >= self._plans["warmup"].steps
        return again + (self._wanted_of("rl") if warm else self._wanted_of("warmup"))

    def coming(self) -> Iterator[Wanted]:
        """First members of all groups that the steps still need, wanted now or later, in the order of their issue."""
        for stage, plan in self._plans.items():
            if stage == "rl":
                yield from (item for item in self._reissues(len(self.state.origins))[0] if item.carries_rows)
            first = self.state.issued[stage]
            first += prompt_name(stage, first) in self.state.members
            last = first + max(0, self._still_needed(stage) - len(self.state.open[stage]))
            if stage == "rl" and self.end is not None:
                last = min(last, self.end)
            for number in range(first, last):
                yield Wanted(stage, number, 0, plan.group_size, self._min_version)

    @property
    def open_groups(self) -> int:
        """Groups issued and not yet ended."""
        return len(self.state.open["warmup"]) + len(self.state.open["rl"])

    @property
    def at_end(self) -> bool:
        """Return whether every prompt of RL is issued."""
        return self.end is not None and self.state.issued["rl"] >= self.end

    @property
    def _min_version(self) -> int:
        return max(0, self.state.trained - self._max_lag)

    def _wanted_of(self, stage: Stage) -> list[Wanted]:
        plan = self._plans[stage]
        # While admission is paused no more is open than the next batch takes: with less nothing would ever be trained,
        # and only what is trained makes room.
        limit = plan.batch_groups if self.state.paused else (self._max_lag + 1) * plan.batch_groups
        room = max(0, min(limit, self._still_needed(stage)) - len(self.state.open[stage]))
        first = self.state.issued[stage]
        # A group cut short by a crash is finished first: it is open already and takes no new room.
        unfinished = self.state.members.get(prompt_name(stage, first), 0)
        reissues, room = self._reissues(room) if stage == "rl" else ([], room)
        last = first + room + bool(unfinished)
        if stage == "rl" and self.end is not None:
            last = min(last, self.end)
        return reissues + [
            Wanted(stage, number, member, plan.group_size, self._min_version)
            for number in range(first, last)
            for member in range(unfinished if number == first else 0, plan.group_size)
        ]

    def _still_needed(self, stage: Stage) -> int:
        """Groups that the steps to come take, those open among them."""
        return (self._plans[stage].steps - self.state.done[stage]) * self._plans[stage].batch_groups

    def _reissues(self, room: int) -> tuple[list[Wanted], int]:
        """Members of groups that were asked for again, as far as there is room; and the room left for new prompts."""
        found: list[Wanted] = []
        size = self._plans["rl"].group_size
        for number, origin in enumerate(self.state.origins):
            begun = self.state.members.get(reissue_name(number), 0)
            if number in self.state.reissued or not (begun or room > 0):
                continue
            room -= not begun
            found += [
                Wanted("rl", number, member, size, self._min_version, origin=origin) for member in range(begun, size)
            ]
        return found, room

    def _wanted_again(self, name: str, attempt: int) -> Wanted:
        prompt_id, member = name.rsplit("-", 1)
        number = int(prompt_id[1:])
        origin = self.state.origins[number] if prompt_id.startswith("r") else ""
        group_size = self._plans["rl"].group_size
        return Wanted("rl", number, int(member), group_size, self._min_version, attempt, origin)

    def _on_reissue(self, prompt_id: str) -> None:
        origin = self.state.origins[int(prompt_id[1:])] if prompt_id.startswith("r") else prompt_id
        if not _PROMPT.fullmatch(origin):
            raise ValueError(f"{origin!r} is no prompt of RL: only those are issued again")
        self.state.origins.append(origin)

    def _on_issued(self, headers: dict[str, str]) -> None:
        stage: Stage = "warmup" if headers["stage"] == "warmup" else "rl"
        name, attempt = headers["trajectory"], int(headers["attempt"])
        prompt_id = name.rsplit("-", 1)[0]
        if attempt:
            if prompt_id in self.state.open[stage]:  # else its end was read before, and nothing is issued again
                self.state.attempts[name] = max(attempt, self.state.attempts.get(name, 0))
            if self.state.again.get(name, 0) <= attempt:
                self.state.again.pop(name, None)
            return
        count = self.state.members.pop(prompt_id, 0) + 1
        if count != int(headers["group-size"]):
            self.state.members[prompt_id] = count
        elif prompt_id.startswith("r"):
            self.state.reissued.add(int(prompt_id[1:]))
        else:
            self.state.issued[stage] += 1
        if prompt_id in self.state.closed_early:
            self.state.closed_early.discard(prompt_id)
        elif count == 1:
            self.state.open[stage].add(prompt_id)

    def _close(self, prompt_ids: list[str]) -> None:
        for prompt_id in prompt_ids:
            for member in range(self._plans["rl"].group_size):
                self.state.again.pop(f"{prompt_id}-{member}", None)
                self.state.attempts.pop(f"{prompt_id}-{member}", None)
            of_stage = self.state.open["warmup" if prompt_id.startswith("w") else "rl"]
            if prompt_id in of_stage:
                of_stage.discard(prompt_id)
            else:
                self.state.closed_early.add(prompt_id)
