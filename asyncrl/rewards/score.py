"""The arguments of a reward, and the values that it may return."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat

import msgspec

from asyncrl.child_pool.frames import CallFailed
from asyncrl.tracing import traceparent
from topics.trajectories import METRICS, NAME_CHARS, TrajectoryGenerated
from topics.wire import GREATEST, WireError


class GradeRequest(msgspec.Struct):
    """The inputs of a reward."""

    completion: str
    prompt: str | list[dict[str, Any]]
    label: Any = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    trajectory_id: str = ""
    traceparent: str = ""  # header that puts requests of the reward into the trace of a traced trajectory


def request_of(generated: TrajectoryGenerated) -> GradeRequest:
    """The inputs of the reward of a trajectory, by its first row.

    Raises:
        WireError: it has none.
    """
    if not generated.rows:
        raise WireError(f"{generated.trajectory_id} has no row to be graded against")
    row = generated.rows[0]
    return GradeRequest(
        completion=generated.completion,
        prompt=row.prompt,
        label=row.label,
        metadata=row.metadata,
        trajectory_id=generated.trajectory_id,
        traceparent=traceparent(),
    )


def read_score(value: Any) -> tuple[float, dict[str, float]]:
    """Read what a reward function returned: a number, or a mapping with "reward" and further numbers.

    Returns:
        The reward and the metrics by name.

    Raises:
        CallFailed: with reason `value`.
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
        raise CallFailed("value", str(error)) from None


def read_scores(values: Any) -> list[tuple[float, dict[str, float]] | str]:
    """Read what a reward function returned for many completions: an iterable of what `read_score` takes.

    Returns:
        For each the reward and the metrics, or why it has no reward: a fault of one does not touch the others.

    Raises:
        CallFailed: with reason `value`; it is no list.
    """
    if isinstance(values, Mapping | str | bytes) or not isinstance(values, Iterable):
        shown = repr(values)[:200]
        raise CallFailed("value", f"the function returned {shown}; expected a list, one score for each completion")
    scores: list[tuple[float, dict[str, float]] | str] = []
    for value in values:
        try:
            scores.append(read_score(value))
        except CallFailed as error:
            scores.append(error.detail)
    return scores


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
