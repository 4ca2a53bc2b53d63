"""Two trainings on the same batches, side by side: what was recorded, and what a replay made of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class ReplayedStep(NamedTuple):
    """One optimiser step of both."""

    step: int
    stage: str
    recorded: dict[str, float]  # metrics by name, units in the names
    replayed: dict[str, float]
    published: str  # digest of the version that was published after it; "" where none was
    digest: str  # of the replay's weights there
    purged: int = 0  # trajectories that were trained, and have no tokens any more


def first_difference(steps: Sequence[ReplayedStep]) -> ReplayedStep | None:
    """The first step after which other weights were published than the replay has."""
    return next((step for step in steps if step.published != step.digest), None)


def columns(steps: Sequence[ReplayedStep]) -> dict[str, list[tuple[int, float, float]]]:
    """(step, recorded, replayed) of every metric that both have, over the steps of RL where there are any."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for step in [step for step in steps if step.stage == "rl"] or steps:
        for name in step.recorded:
            if name in step.replayed:
                found.setdefault(name, []).append((step.step, step.recorded[name], step.replayed[name]))
    return found


def medians(steps: Sequence[ReplayedStep]) -> dict[str, tuple[float, float]]:
    """Median (recorded, replayed) of each of the columns."""
    return {
        name: (statistics.median(was for _, was, _ in column), statistics.median(now for _, _, now in column))
        for name, column in columns(steps).items()
    }


def medians_text(steps: Sequence[ReplayedStep]) -> str:
    """The medians as a table, one metric a line."""
    lines = [f"{'median of a step':>20}  {'recorded':>12}  {'replayed':>12}"]
    lines += [f"{name:>20}  {was:>12.6g}  {now:>12.6g}" for name, (was, now) in medians(steps).items()]
    return "\n".join(lines)
