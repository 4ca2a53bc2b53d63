"""The state of a run, for exporters, pages and other programs."""

from __future__ import annotations

from typing import Literal

import msgspec

from topics.actors import ScaledBy
from topics.alerts import AlertRaised
from topics.profiles import ProfileStored
from topics.stalls import StallFound
from topics.topic import HISTORY, VITALS, Topic
from topics.wire import Id, Message


class EvalStatus(msgspec.Struct):
    """The result of an evaluation."""

    version: int
    accuracy: float


class StreamStatus(msgspec.Struct):
    """The fill level of a payload stream."""

    bytes: int
    max_bytes: int
    share: float  # 0 to 1


class EngineStatus(msgspec.Struct):
    """An inference server."""

    engine_id: Id
    state: Literal["ready", "updating", "gone"]
    version: int | None  # that it has, or is taking
    update_s: float  # of its newest update


class ActorStatus(msgspec.Struct):
    """A process of a role."""

    actor_id: Id
    role: str
    host: str
    pid: int
    live: bool
    restarts: int
    last_error: str  # why it is not there
    silent_s: float | None  # since its newest vital signs
    vitals: dict[str, float]


class PoolStatus(msgspec.Struct):
    """The living processes of a pool, and what keeps it from its number."""

    live: int
    cores: float  # that the living processes use
    silent: int  # living, but without vital signs for 10 s
    restarts: int
    last_error: str  # why a process is not there
    gauges: dict[str, float] = msgspec.field(default_factory=dict)  # means of `gpu_share`, `cache_share` and others


class ScalingStatus(msgspec.Struct):
    """The newest change of a pool's number of processes, and the reason of the current number."""

    pool: str
    before: int
    after: int
    by: ScaledBy  # "": nothing has changed it
    reason: str
    at_s: float | None  # seconds since the epoch
    held: str  # why the rule does not change it now; empty: it may, or there is none for this pool


class RunEvent(msgspec.Struct):
    """Something worth a line."""

    kind: Literal["step", "news", "warning"]
    at_s: float  # seconds since the epoch
    text: str


class RunStatus(Message, omit_defaults=False):
    """The state of a run as the supervisor sees it, once a second. Its lists are bounded."""

    run: str
    at_s: float  # seconds since the epoch
    state: Literal["starting", "running", "paused", "stopping", "finished", "stopped", "failed", "crashed"]
    failure: str  # last output of a run that failed
    elapsed_s: float
    stage: str | None  # of the newest step
    step: int | None
    steps: int  # of RL, in all; 0: not known
    warmup_steps: int
    version: int | None
    lineage: int
    checkpoint_step: int | None
    reward: float | None  # mean of the newest RL step
    rewards: list[float]  # of all RL steps, in at most 200 stretches of equal length: the mean of each
    metrics: dict[str, float]  # of the newest step, with the names of `metrics.jsonl`
    mean_lag_versions: float | None
    recent_tokens_by_lag: dict[int, int]
    per_s: dict[str, float]  # steps, trajectories, tokens
    evals: list[EvalStatus]  # the first and the newest 31
    queues: dict[str, dict[str, int]]
    streams: dict[str, StreamStatus]
    trims: int
    trimmed_bytes: int
    admission_paused: str  # why
    open_groups: float | None
    ready_groups: float | None
    groups_dropped: dict[str, int]  # since the newest batch, by reason
    engines: list[EngineStatus]  # `run.state` lists at most 256
    wanted: dict[str, int]  # processes of each pool: a role, or a group of engines
    scalings: list[ScalingStatus]  # of pools that were scaled, or that the rule scales
    autoscale_fault: str  # why the user's function does not answer
    actors: list[ActorStatus]  # `run.state` lists at most 256, some of each pool
    stalls: list[StallFound]
    judge_agreement: float | None  # share of the newest grades of judges with whose sign users agree
    trajectories_failed: int
    last_failure: str
    messages_unreadable: int
    last_unreadable: str
    # The newest 64 since the run was opened; of steps the newest one.
    events: list[RunEvent] = msgspec.field(default_factory=list)
    alerts: list[AlertRaised] = msgspec.field(default_factory=list)  # that are open
    pools: dict[str, PoolStatus] = msgspec.field(default_factory=dict)  # of all actors
    profiles: list[ProfileStored] = msgspec.field(default_factory=list)  # the newest 32, the newest last


class RunMoment(Message):
    """The state of a run at one time: counts and rates, but no actor by name, so its size does not grow with them."""

    every: Literal["1s", "10s", "60s"]  # time between two moments; they are kept for 10 minutes, 6 hours, and always
    at_s: float  # seconds since the epoch
    state: str  # as in `run.state`
    step: int | None
    version: int | None
    metrics: dict[str, float]  # of the newest step: `reward/mean`, `response_length/mean`, `lag/mean` and others
    per_s: dict[str, float]  # steps, trajectories, tokens
    waiting: dict[str, int]  # messages in each work queue
    under_way: dict[str, int]  # messages of each work queue that workers have
    stream_shares: dict[str, float]  # fill level of each payload stream, 0 to 1
    open_groups: float | None
    ready_groups: float | None
    wanted: dict[str, int]  # processes of each pool
    live: dict[str, int]  # processes of each pool that live
    cores: dict[str, float]  # that the living processes of each pool use
    gauges: dict[str, dict[str, float]]  # means over each pool: use of GPUs and of the caches of engines, 0 to 1
    engines: dict[str, int]  # servers by state: ready, updating
    stalls: list[str]  # cause and object of each


RUN_STATE = Topic(RunStatus, VITALS, ("supervisor",), ("monitor",), json=True, name="run.state")
RUN_HISTORY = Topic(RunMoment, HISTORY, ("supervisor",), ("monitor",), key="every", json=True, name="run.history")
