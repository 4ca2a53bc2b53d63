"""The frames between a worker and its sandbox children, over pipes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, SupportsFloat, TypeAlias

import msgspec

from asyncrl.errors import AsyncRLError
from topics.trajectories import METRICS, NAME_CHARS
from topics.wire import GREATEST

Reason: TypeAlias = Literal["raised", "value", "time_limit", "memory", "exited", "http", "closed"]

REPLY_BYTES = 1 << 20  # of what a child answers


class GradeRequest(msgspec.Struct):
    """The inputs of a reward."""

    completion: str
    prompt: str | list[dict[str, Any]]
    label: Any = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    trajectory_id: str = ""


class RewardFailed(AsyncRLError):
    """A reward that could not be had for one trajectory.

    `reason` is `raised`, `value` (no finite number came back), `time_limit`, `memory`, `exited` (the function ended
    its process), `http` (the address cannot be reached or refuses) or `closed` (the grader was closed meanwhile).
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def memory_text(memory_mb: int) -> str:
    """The limit as its failures name it."""
    return f"reward.memory_mb = {memory_mb:,} MB"


class Setup(msgspec.Struct):
    """First frame to a child: the function it calls."""

    spec: str
    base: str
    time_limit_s: float
    arguments: dict[str, Any] | None = None  # not None: `spec` makes the function when called with these
    memory_mb: int = 0  # limit for each of its processes; 0 for none
    rollout: bool = False  # not a reward: it is only loaded, and looked at


def reward_setup(spec: str, *, base: Path, time_limit_s: float, memory_mb: int) -> Setup | None:
    """Return the setup by which a child finds the reward that `spec` names; None where that is no function."""
    kind, colon, name = spec.partition(":")
    if spec == "math":
        return Setup("asyncrl.rewards.scorers:make_math", "", time_limit_s, {}, memory_mb)
    if kind == "reasoning-gym":
        dataset = {"dataset": name or None}
        return Setup("asyncrl.rewards.scorers:make_reasoning_gym", "", time_limit_s, dataset, memory_mb)
    if colon and kind not in ("http", "https"):
        return Setup(spec, str(base), time_limit_s, None, memory_mb)
    return None


class Ready(msgspec.Struct):
    """First frame from a child: the function is loaded, or why not."""

    error: str = ""
    concurrent: bool = False  # an async function: many calls at once
    pid: int = 0  # of the child, which leads its group; its supervisor has another


class Call(msgspec.Struct, array_like=True):
    """One request to a child."""

    id: int
    request: GradeRequest


class Reply(msgspec.Struct, array_like=True):
    """The result of a call."""

    id: int
    reward: float = 0.0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    reason: Reason | None = None  # None where there is a reward
    detail: str = ""
    leftover: bool = False  # a call was ended at its limit, and processes that it may have started live


def read_score(value: Any) -> tuple[float, dict[str, float]]:
    """Read what a reward function returned: a number, or a mapping with "reward" and further numbers.

    Returns:
        The reward and the metrics by name.

    Raises:
        RewardFailed: with reason `value`.
    """
    try:
        if not isinstance(value, Mapping):
            return finite(value, "the function returned"), {}
        if "reward" not in value:
            names = ", ".join(map(repr, value)) or "nothing"
            raise ValueError(f"the function returned no 'reward' but {names[:1000]}")
        metrics = read_metrics({name: number for name, number in value.items() if name != "reward"})
        return finite(value["reward"], "'reward' is"), metrics
    except ValueError as error:
        raise RewardFailed("value", str(error)) from None


def read_metrics(values: Mapping[Any, Any]) -> dict[str, float]:
    """Check named numbers that belong to one trajectory.

    Raises:
        ValueError: there are more than `METRICS`, a name is too long, or a value is no finite number.
    """
    if len(values) > METRICS:
        raise ValueError(f"found {len(values)} metrics, expected at most {METRICS} for one trajectory; give fewer")
    # Half a surrogate pair, as from JSON, is in no message.
    names = {name: str(name).encode(errors="backslashreplace").decode() for name in values}
    return {check_name(names[name]): finite(number, f"{name!r} is") for name, number in values.items()}


def check_name(name: str) -> str:
    """Return a name of a metric or artefact; raises ValueError for one that is empty or too long."""
    if not 0 < len(name) <= NAME_CHARS:
        raise ValueError(f"the name {name[:80]!r} has {len(name)} characters, expected 1 to {NAME_CHARS}")
    return name


def finite(value: Any, subject: str) -> float:
    """Return a number that a message can hold; raises ValueError for anything else, beginning with the subject."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError):  # an array of several numbers, an integer past 1e308
        number = math.nan
    if not abs(number) <= GREATEST:  # a NaN is not either
        raise ValueError(f"{subject} {repr(value)[:200]}; expected a number from {-GREATEST:g} to {GREATEST:g}")
    return number
