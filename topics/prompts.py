"""Messages about prompts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

from topics.ids import Stage, member_of, trajectory_name
from topics.topic import PROMPTS, Topic
from topics.wire import Headers, Id, MaybeId, Message, SecretIds, Version

GroupSize: TypeAlias = Annotated[int, Meta(ge=1, le=65536)]
Member: TypeAlias = Annotated[int, Meta(ge=0, lt=65536)]
Attempt: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0.0, le=1000.0)]  # 0 is greedy

ONLY_TASK = "task"  # name of the task of a run that has one
WARMUP_TASK = "warmup"  # of its trajectories, which may have rows of several tasks
LIVE_TASK = "live"  # of turns of live traffic
NO_ESTIMATOR = "none"  # of groups whose rewards are not compared


class PromptRow(msgspec.Struct, omit_defaults=True):
    """One row of a task, as its data source gives it."""

    prompt: str | list[dict[str, Any]]  # plain text, or chat messages {"role", "content"}
    label: Any = None  # the reference of the reward; None where the task has none
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


class PromptIssuedHeaders(Headers):
    """Headers that folds need of a prompt, so that they never read the rows."""

    trajectory_id: Id
    attempt: Attempt
    stage: Stage
    group_size: GroupSize
    min_version: Version
    temperature: Temperature
    task: Id = ONLY_TASK
    estimator: str = NO_ESTIMATOR
    origin: MaybeId = ""
    tenant: str = ""
    secrets: SecretIds = ""
    wanted: Annotated[int, Meta(ge=0, le=65536)] = 0

    def __post_init__(self) -> None:
        if member_of(self.trajectory_id) >= self.group_size:
            raise ValueError(f"{self.trajectory_id} is no member of a group of {self.group_size}")


class PromptIssued(Message):
    """One trajectory is wanted: member `member` of the group of a prompt."""

    HEADERS: ClassVar[type[Headers]] = PromptIssuedHeaders

    prompt_id: Id  # "p000042"; its letter names its origin (topics/ids.py)
    member: Member  # 0 .. group_size - 1
    group_size: GroupSize
    rows: list[PromptRow] = msgspec.field(default_factory=list)  # with member 0 once for its group, or one's own
    attempt: Attempt = 0  # raised when the prompter issues the trajectory again
    stage: Stage = "rl"
    min_version: Version = 0  # the oldest version that may sample it
    seed: int = 0  # of what the rollout function draws by `context.random`
    origin: MaybeId = ""  # prompt whose row this is, where an operator asked to issue it again
    task: Id = ONLY_TASK  # whose row it is
    temperature: Temperature = 1.0  # of its sampling
    estimator: str = NO_ESTIMATOR  # of its group's advantages
    level: Annotated[int, Meta(ge=0, le=2**20)] = 0  # difficulty of its row, with a curriculum
    secrets: SecretIds = ""  # data keys that reading it takes, of a turn of live traffic
    # Members that the group needs: once as many are complete, the others end as `surplus`. 0: all of them.
    wanted: Annotated[int, Meta(ge=0, le=65536)] = 0

    @property
    def trajectory_id(self) -> str:
        """`p000042-3`."""
        return trajectory_name(self.prompt_id, self.member)

    @property
    def tenant(self) -> str:
        """Whose turn of live traffic it is; of other prompts ""."""
        return str(self.rows[0].metadata.get("tenant", "")) if self.task == LIVE_TASK and self.rows else ""


PROMPT_ISSUED = Topic(
    PromptIssued,
    PROMPTS,
    ("prompter",),
    ("rollout", "prompter", "buffer", "recorder", "supervisor"),
    key="trajectory_id",
    id=("trajectory_id", "attempt"),
    lane=True,
    pooled=True,
)
