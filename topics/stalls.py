"""Messages about stalls: why nothing is trained."""

from __future__ import annotations

from typing import Literal, TypeAlias

from topics.topic import FLEET, Topic
from topics.wire import Message

Cause: TypeAlias = Literal[
    "server unreachable",
    "permission missing",
    "disk full",
    "stream full",
    "clock off",
    "dead letters",
    "actor silent",
    "actor dying",
    "no writer",
    "no worker",
    "engine dead",
    "engine paused",
    "version not loaded",
    "mislabelled",
    "weights not direct",
    "weights unchanged",
    "weights not finite",
    "assertion broken",
    "step anomalous",
    "learner behind",
    "cards missing",
    "cluster away",
    "teacher away",
    "card not left",
    "reward hanging",
    "reward failing",
    "rollout hanging",
    "sandbox pool empty",
    "sandbox pool throttled",
    "sandbox pool leaking",
    "straggler",
    "groups dropped",
    "channel behind",
    "live alarm",
    "turns unrecorded",
    "metrics unwritten",
    "no credit",
    "end of data",
    "slow data",
    "unexplained",
    "run paused",
    "run failed",
    "run killed",
]


class StallFound(Message):
    """A cause that keeps the run from advancing."""

    cause: Cause
    object: str  # the object: "reward-1", "p000042-3", "TRAJECTORIES"
    evidence: str  # the evidence, with numbers
    advice: str  # what to do


class StallEnded(Message):
    """The stall is over."""

    cause: Cause
    object: str


STALL_FOUND = Topic(StallFound, FLEET, ("supervisor",), ("monitor", "supervisor"))
STALL_ENDED = Topic(StallEnded, FLEET, ("supervisor",), ("monitor", "supervisor"))
