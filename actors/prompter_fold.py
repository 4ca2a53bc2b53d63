"""What the prompter knows, as a pure function of messages: which groups are open, and how many more may be."""

from __future__ import annotations

from typing import Any, NamedTuple

from asyncrl.bus.log import Record
from asyncrl.settings import Cast
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.groups import GROUP_DROPPED
from topics.prompts import PROMPT_ISSUED, Stage, prompt_name
from topics.topic import Topic
from topics.trajectories import TRAJECTORY_DROPPED
from topics.weights import TRAINING_FINISHED


class Wanted(NamedTuple):
    """A group member to be issued."""

    stage: Stage
    number: int  # of the prompt in its source's endless order
    member: int
    group_size: int
    min_version: int
    attempt: int = 0

    @property
    def prompt_id(self) -> str:
        """`p000042`."""
        return prompt_name(self.stage, self.number)


class StagePlan(NamedTuple):
    """How many groups of a stage there shall be."""

    group_size: int
    batch_groups: int
    steps: int


def stage_plans(cast: Cast) -> dict[Stage, StagePlan]:
    """The stages of a run and their sizes."""
    return {
        "warmup": StagePlan(1, cast.warmup.batch_rows // cast.warmup.rows_per_trajectory, cast.warmup.steps),
        "rl": StagePlan(cast.rollout.group_size, cast.buffer.batch_groups, cast.learner.steps),
    }


class PrompterFold:
    """Open groups are those issued, and neither in a distinct trained batch nor dropped; each returns one credit."""

    def __init__(self, cast: Cast) -> None:
        self._plans = stage_plans(cast)
        self._max_lag = cast.buffer.max_lag
        self._issued: dict[Stage, int] = {"warmup": 0, "rl": 0}  # groups whose every member is issued
        self._members: dict[str, int] = {}  # issued members of groups not yet complete
        self._open: dict[Stage, set[str]] = {"warmup": set(), "rl": set()}
        self._closed_early: set[str] = set()  # ends read before the issue they end: logs have no common order
        self._packed: dict[int, list[str]] = {}
        self._again: dict[str, int] = {}  # trajectories to issue again, with the attempt
        self._attempts: dict[str, int] = {}  # newest attempt issued, where above 0
        self._trained_ahead: set[int] = set()  # trained before their packing was read
        self._done: dict[Stage, int] = {"warmup": 0, "rl": 0}  # trained batches
        self.trained = -cast.warmup.steps
        self.finished = False

    def apply(self, topic: Topic[Any], message: Any, record: Record) -> None:
        """Fold one message in. Issues are read by their headers alone."""
        if topic is PROMPT_ISSUED:
            self._on_issued(record.headers)
        elif topic is BATCH_PACKED:
            groups = [group.prompt_id for group in message.groups]
            if message.step in self._trained_ahead:
                self._trained_ahead.discard(message.step)
                self._close(groups)
            else:
                self._packed[message.step] = groups
        elif topic is BATCH_TRAINED:
            if message.step <= self.trained:
                return  # trained again after a rollback: its groups returned their credit already
            self.trained = message.step
            self._done[message.stage] += 1
            groups_or_none = self._packed.pop(message.step, None)
            if groups_or_none is None:
                self._trained_ahead.add(message.step)
            else:
                self._close(groups_or_none)
        elif topic is GROUP_DROPPED:
            self._close([message.prompt_id])
        elif topic is TRAJECTORY_DROPPED:
            attempt = message.attempt + 1
            if message.again and self._attempts.get(message.trajectory_id, 0) < attempt:
                self._again[message.trajectory_id] = attempt
        elif topic is TRAINING_FINISHED:
            self.finished = True

    def wanted(self) -> list[Wanted]:
        """What may be issued now, in order."""
        if self.finished:
            return []
        again = [self._wanted_again(name, attempt) for name, attempt in self._again.items()]
        warmup, plan = self._wanted_of("warmup"), self._plans["warmup"]
        all_warm = self._issued["warmup"] + len(warmup) >= plan.steps * plan.batch_groups
        return again + warmup + (self._wanted_of("rl") if all_warm else [])

    @property
    def open_groups(self) -> int:
        """Groups issued and not yet ended."""
        return len(self._open["warmup"]) + len(self._open["rl"])

    @property
    def _min_version(self) -> int:
        return max(0, self.trained - self._max_lag)

    def _wanted_of(self, stage: Stage) -> list[Wanted]:
        plan = self._plans[stage]
        limit = (self._max_lag + 1) * plan.batch_groups
        still_needed = (plan.steps - self._done[stage]) * plan.batch_groups
        room = min(limit, still_needed) - len(self._open[stage])
        first = self._issued[stage]
        # A group cut short by a crash is finished first: it is open already and takes no new room.
        unfinished = self._members.get(prompt_name(stage, first), 0)
        return [
            Wanted(stage, number, member, plan.group_size, self._min_version)
            for number in range(first, first + room + bool(unfinished))
            for member in range(unfinished if number == first else 0, plan.group_size)
        ]

    def _wanted_again(self, name: str, attempt: int) -> Wanted:
        prompt_id, member = name.rsplit("-", 1)
        group_size = self._plans["rl"].group_size
        return Wanted("rl", int(prompt_id[1:]), int(member), group_size, self._min_version, attempt)

    def _on_issued(self, headers: dict[str, str]) -> None:
        stage: Stage = "warmup" if headers["stage"] == "warmup" else "rl"
        name, attempt = headers["trajectory"], int(headers["attempt"])
        if attempt:
            self._attempts[name] = max(attempt, self._attempts.get(name, 0))
            if self._again.get(name, 0) <= attempt:
                self._again.pop(name, None)
            return
        prompt_id = name.rsplit("-", 1)[0]
        count = self._members.pop(prompt_id, 0) + 1
        if count == int(headers["group-size"]):
            self._issued[stage] += 1
        else:
            self._members[prompt_id] = count
        if prompt_id in self._closed_early:
            self._closed_early.discard(prompt_id)
        elif count == 1:
            self._open[stage].add(prompt_id)

    def _close(self, prompt_ids: list[str]) -> None:
        for prompt_id in prompt_ids:
            of_stage = self._open["warmup" if prompt_id.startswith("w") else "rl"]
            if prompt_id in of_stage:
                of_stage.discard(prompt_id)
            else:
                self._closed_early.add(prompt_id)
