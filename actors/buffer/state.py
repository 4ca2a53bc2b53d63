"""The state of the buffer, as plain data, and the settings that it decides by."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import msgspec

from asyncrl.config.held_out import HeldOut, held_out_sets
from asyncrl.config.settings import Config
from asyncrl.config.tasks import Begun, first_stages
from asyncrl.training.objective import objective_of
from topics.batches import BatchMember, Objective
from topics.ids import PromptIdSet, Stage
from topics.prompts import NO_ESTIMATOR, ONLY_TASK
from topics.trajectories import DropReason, TrajectoryFailed, TrajectoryGraded, TrajectorySubmitted

LAG: DropReason = "lag"
"""Reason of the drop of a group that was kept, and was too old when a batch could take it."""


class Group(msgspec.Struct):
    """An open group and the known facts about its members."""

    prompt_id: str
    size: int
    stage: Stage
    task: str = ONLY_TASK  # that was named last
    tasks: dict[int, str] = {}  # of the members of an evaluation that mixes tasks
    temperature: float = 1.0
    estimator: str = NO_ESTIMATOR
    min_version: int = 0  # that it was issued for first
    issued: int = 0  # members
    wanted: int = 0  # members that are trained; 0: all
    keep: bool = False  # the other ones continue, and a later batch takes them
    taken: dict[int, BatchMember] = {}  # members in a batch, while others continue
    further: set[int] = set()  # those that do
    stages: int = 0  # that had begun when it was issued
    graded: dict[int, TrajectoryGraded] = {}
    graded_ns: dict[int, int] = {}  # server's clock at each grade
    failed: dict[int, TrajectoryFailed] = {}
    submitted: dict[int, TrajectorySubmitted] = {}  # generated members whose reward needs the whole group
    # members that one call grades, by the group's name, if group.completed was published
    completed: dict[str, list[int]] = {}
    dropped: set[int] = set()  # members with their own end
    attempts: dict[int, int] = {}  # least attempt that counts, where a member was issued again
    tenant: str = ""  # of a live turn
    expired: bool = False  # its deadline has passed with members open
    secrets: str = ""  # data keys that reading it takes, of a turn of live traffic

    @property
    def complete(self) -> bool:
        """Return whether every member has a grade, a failure, or an end."""
        if len(self.graded) + len(self.failed) + len(self.dropped) < self.size:
            return False
        return len(self.graded.keys() | self.failed.keys() | self.dropped) >= self.size

    @property
    def enough(self) -> bool:
        """Return whether a batch may take it: it is complete, or the graded members suffice and the others continue."""
        return self.complete or (self.keep and 0 < self.wanted <= len(self.live()))

    @property
    def known(self) -> bool:
        """Return whether no member is running: each is complete, or waits for the reward of the group."""
        return self.complete or bool(self.submitted and all(map(self.is_known, range(self.size))))

    @property
    def being_issued(self) -> bool:
        """Return whether members of an evaluation are still to be issued: before that they have no end."""
        return self.stage == "eval" and self.issued < self.size

    def is_known(self, member: int) -> bool:
        """Return whether a member has a grade, a failure or an end, or needs the whole group for its grade."""
        return any(member in names for names in (self.submitted, self.graded, self.failed, self.dropped))

    def waits_for_group(self, member: int) -> bool:
        """Return whether a member is generated, and to be graded with its group."""
        over = member in self.graded or member in self.failed or member in self.dropped
        return member in self.submitted and not over

    def ungraded(self) -> list[TrajectorySubmitted]:
        """Members that are generated, and to be graded with the group."""
        return [member for number, member in self.submitted.items() if self.waits_for_group(number)]

    @property
    def least(self) -> int:
        """Least number of graded members: a group with fewer is dropped as a whole. An evaluation counts missing
        members as reward 0."""
        return 0 if self.stage == "eval" else min(2, self.size)

    def task_of(self, member: int) -> str:
        """Task of a member's row."""
        return self.tasks.get(member, self.task)

    def live(self) -> list[TrajectoryGraded]:
        """Graded members that may be trained on, by member number."""
        return [self.graded[member] for member in sorted(self.graded) if member not in self.dropped]

    def to_train(self) -> list[TrajectoryGraded]:
        """Those of them that no batch has."""
        return [member for member in self.live() if member.member not in self.taken]


class BufferState(msgspec.Struct):
    """The whole state as plain data, which snapshots hold. A field whose meaning changes gets another name."""

    packed: int
    trained: int
    groups: dict[str, Group] = {}
    ready: dict[Stage, dict[str, None]] = msgspec.field(
        default_factory=lambda: {"warmup": {}, "rl": {}, "eval": {}}
    )  # complete
    closed: PromptIdSet = msgspec.field(default_factory=PromptIdSet)
    waiting_drop: dict[str, None] = {}  # complete, with members to end
    # Of open groups: server's clock at the first member's issue, of evaluations at the newest; in that order.
    issued: dict[Stage, dict[str, int]] = msgspec.field(default_factory=lambda: {"warmup": {}, "rl": {}, "eval": {}})
    surplus: dict[str, None] = {}  # open groups with more members than are wanted of them
    continued: dict[str, None] = {}  # groups in a batch with members that continue
    gathered: dict[str, list[int]] = {}  # members to be graded by one call that is to be published, by group
    grading: dict[str, int] = {}  # server's clock when that was published, in that order
    stages: list[str] = []  # of the run that began, in their order
    stages_packed: int = 0  # that had begun when the newest group of a batch was issued
    opened_ns: int = 0  # server's clock when the run began or resumed: deadlines do not run while the run is stopped
    # Rewards that users want instead of those of judges, by prompt that is not closed, and member.
    wanted: dict[str, dict[int, float]] = {}
    purged: set[str] = set()  # data keys that were erased
    purging: dict[str, None] = {}  # open groups that end with one of these
    late: int = 0  # claims and grades that came after the end
    graded_ns: int = 0  # server's clock at the newest grade
    last_failure: str = ""
    failures: dict[Stage, list[int]] = msgspec.field(default_factory=lambda: {"warmup": [], "rl": []})
    """Server's clock when the latest groups failed."""
    kept_ns: int = 0  # server's clock when the newest group was kept, or the newest stage began
    # groups since `kept_ns`, the newest batch and the last resumption; by reason, without lag
    dropped: dict[str, int] = {}


class Plan(NamedTuple):
    """The settings of packing."""

    batch_groups: dict[Stage, int]
    origin: int  # step of the weights before the first batch
    steps: int
    max_lag: int
    ahead: int
    min_fresh: float
    drop_stale: bool  # no stale token is trained on masked: its trajectory ends
    reissue: bool  # and is issued again
    deadline_s: dict[Stage, float]
    objective: Callable[[int, str], Objective]  # of a step in a stage, which is recorded with its batch
    held_out: dict[str, HeldOut]  # sets, by name
    stages: list[Begun]  # stages of the original run that began before the fork
    most_dropped: int = 0  # groups in a row, for each of a batch, after which the run ends; 0: never
    tenant_most: int = 2**31  # live turns of one tenant in a batch
    keep: bool = False  # late members

    @classmethod
    def of(cls, config: Config) -> Plan:
        """Read them from the config."""
        learner = config.learner
        return cls(
            batch_groups={
                "warmup": config.warmup.batch_groups,
                "rl": config.buffer.batch_groups,
            },
            origin=config.origin,
            steps=learner.steps,
            max_lag=config.buffer.max_lag,
            ahead=config.ahead,
            min_fresh=config.buffer.min_fresh,
            drop_stale=config.buffer.stale != "mask",
            reissue=config.buffer.stale == "reissue",
            deadline_s={
                "warmup": config.buffer.group_deadline_s,
                "rl": config.buffer.group_deadline_s,
                "eval": config.eval.deadline_s,
            },
            objective=lru_cache(2)(partial(objective_of, config)),  # each group of a batch is filtered by it
            held_out=held_out_sets(config),
            stages=first_stages(config.start),
            most_dropped=config.buffer.max_dropped_groups,
            keep=config.rollout.late == "keep",
            tenant_most=math.ceil(config.live.safety.tenant_share * config.buffer.batch_groups),
        )
