"""The state of the buffer, as plain data."""

from __future__ import annotations

import msgspec

from topics.ids import PromptIdSet, Stage
from topics.prompts import NO_ESTIMATOR, ONLY_TASK
from topics.trajectories import TrajectoryFailed, TrajectoryGraded


class Group(msgspec.Struct):
    """An open group: what is known of its members."""

    prompt_id: str
    size: int
    stage: Stage
    task: str = ONLY_TASK  # that was named last
    tasks: dict[int, str] = {}  # of the members of an evaluation that mixes tasks
    temperature: float = 1.0
    estimator: str = NO_ESTIMATOR
    min_version: int = 0  # that it was issued for first
    issued: int = 0  # members
    graded: dict[int, TrajectoryGraded] = {}
    graded_ns: dict[int, int] = {}  # server's clock at each grade
    failed: dict[int, TrajectoryFailed] = {}
    dropped: set[int] = set()  # members with an end of their own
    attempts: dict[int, int] = {}  # least attempt that counts, where a member was issued again
    expired: bool = False  # its deadline has passed with members open

    @property
    def complete(self) -> bool:
        """Return whether every member has a grade, a failure, or an end."""
        if len(self.graded) + len(self.failed) + len(self.dropped) < self.size:
            return False
        return len(self.graded.keys() | self.failed.keys() | self.dropped) >= self.size

    @property
    def least(self) -> int:
        """Graded members without which it is dropped as a whole; an evaluation counts what is missing as reward 0."""
        return 0 if self.stage == "eval" else min(2, self.size)

    def task_of(self, member: int) -> str:
        """Task of a member's row."""
        return self.tasks.get(member, self.task)

    def live(self) -> list[TrajectoryGraded]:
        """Graded members that may be trained on, by member number."""
        return [self.graded[member] for member in sorted(self.graded) if member not in self.dropped]


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
    opened_ns: int = 0  # server's clock when the run began or went on: while it rested, no deadline came nearer
    late: int = 0  # claims and grades that came after the end
    graded_ns: int = 0  # server's clock at the newest grade
    last_failure: str = ""
    failures: dict[Stage, list[int]] = msgspec.field(default_factory=lambda: {"warmup": [], "rl": []})
    """Server's clock when the latest groups failed."""
