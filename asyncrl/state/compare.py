"""The metrics of a run against a corridor, which trusted runs span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from asyncrl.errors import AsyncRLError
from asyncrl.sinks.figures import point_of, step_figure
from asyncrl.telemetry.metric_names import read_rows


class NotComparable(AsyncRLError):
    """Trusted runs span no corridor."""


class Verdict(msgspec.Struct):
    """The result of one metric."""

    metric: str
    windows: int  # that the corridor has
    outside: int  # windows outside of it
    worst_step: int | None = None  # last step of the window that is farthest outside, or the first step without a value
    value: float | None = None  # mean of that window
    low: float | None = None  # bounds of the corridor there
    high: float | None = None
    fault: str = ""  # why the run fails; empty: it passes


def read_figures(metrics: Path, names: Sequence[str]) -> dict[str, dict[int, float]]:
    """Read finite figures of RL steps: by name, then by step.

    Args:
        metrics: `metrics.jsonl` of a run.
        names: of figures, such as `reward/mean`; older names are aliases.
    """
    points = [point_of(row) for row in read_rows(metrics, "step") if row.get("stage", "rl") == "rl"]
    return {
        name: {point.step: point.figures[figure] for point in points if figure in point.figures}
        for name, figure in ((name, step_figure(name)) for name in names)
    }


def windows_of(values: Mapping[int, float], window: int, last: int) -> dict[int, float]:
    """Return the means of windows of steps 1 to `last`, by the last step of each; the last window may be shorter.

    A window in which a step has no value is left out.
    """
    found = {}
    for begin in range(1, last + 1, window):
        steps = range(begin, min(begin + window, last + 1))
        if all(step in values for step in steps):
            found[steps[-1]] = fmean(values[step] for step in steps)
    return found


def judge(
    metric: str, run: Mapping[int, float], trusted: Sequence[Mapping[int, float]], window: int, tolerance: float
) -> Verdict:
    """Return whether every window of a run is inside the corridor of trusted runs.

    The corridor reaches from the smallest to the greatest mean of the trusted runs in the same window. It is wider by
    `tolerance` times the greater absolute value of the two, on both sides. It ends at the last step of the shortest
    trusted run. A step without a finite value fails.

    Args:
        run: values by step.
        trusted: the same of each trusted run.
        window: steps over which a mean is taken.

    Raises:
        NotComparable: a trusted run has no value of the metric in one of these steps.
    """
    last = min(max(values, default=0) for values in trusted)
    corridor = [windows_of(values, window, last) for values in trusted]
    if not last or any(len(means) < -(-last // window) for means in corridor):
        raise NotComparable(f"a trusted run lacks {metric} in some step up to step {last}; name another run or metric")
    verdict = Verdict(metric, len(corridor[0]), 0)
    missing = [step for step in range(1, last + 1) if step not in run]
    if missing:
        verdict.worst_step = missing[0]
        verdict.fault = f"{len(missing)} of {last} steps have no finite value, the first is step {missing[0]}"
    excess = 0.0
    for step, value in windows_of(run, window, last).items():
        least, most = min(means[step] for means in corridor), max(means[step] for means in corridor)
        margin = tolerance * max(abs(least), abs(most))
        low, high = least - margin, most + margin
        beyond = max(low - value, value - high)
        verdict.outside += beyond > 0
        if beyond > excess and not missing:
            excess = beyond
            verdict.worst_step, verdict.value, verdict.low, verdict.high = step, value, low, high
    if verdict.outside and not missing:
        verdict.fault = f"{verdict.outside} of {verdict.windows} windows are outside of the corridor"
    return verdict
