"""What is said about prompts."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from topics.topic import PROMPTS, Topic
from topics.wire import Message

Stage: TypeAlias = Literal["warmup", "rl"]


def prompt_name(stage: Stage, number: int) -> str:
    """`p000042`; the warm-up's rows have an order of their own, `w000042`."""
    return f"{'w' if stage == 'warmup' else 'p'}{number:06d}"


class PromptRow(msgspec.Struct, omit_defaults=True):
    """One row of a task, as its data source gives it."""

    prompt: str | list[dict[str, Any]]  # plain text, or chat messages {"role", "content"}
    label: Any = None  # what the reward compares with; None where the task has none
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


class PromptIssued(Message):
    """One trajectory is wanted: member `member` of the group of a prompt."""

    prompt_id: str  # "p000042"; "w000007" in the warm-up, whose rows have an order of their own
    member: int  # 0 .. group_size - 1
    group_size: int
    rows: list[PromptRow]  # one row; in supervised stages each becomes a segment
    attempt: int = 0  # raised when the prompter issues the trajectory again
    stage: Stage = "rl"
    min_version: int = 0  # no engine behind this version may sample it
    seed: int = 0  # of this trajectory's sampling

    @property
    def trajectory_id(self) -> str:
        """`p000042-3`."""
        return f"{self.prompt_id}-{self.member}"

    def headers(self) -> dict[str, str]:
        """What folds need, so that they never read the rows."""
        return {
            "trajectory": self.trajectory_id,
            "attempt": str(self.attempt),
            "stage": self.stage,
            "group-size": str(self.group_size),
            "min-version": str(self.min_version),
        }


PROMPT_ISSUED = Topic(
    "prompt.issued",
    PromptIssued,
    PROMPTS,
    said_by=("prompter",),
    heard_by=("rollout", "prompter", "buffer"),
    key="trajectory_id",
)

TOPICS = (PROMPT_ISSUED,)
