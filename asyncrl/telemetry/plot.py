"""Pictures of a run: reward and lag over time, and how a replay compares with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

_PANELS = 3  # in a row at least: enough to make the picture wider than high


def draw_reward(
    path: Path, title: str, seconds: Sequence[float], *, rewards: Sequence[float], lags: Sequence[float]
) -> None:
    """Draw the mean reward of each RL step and its five-step mean, with the mean lag below.

    Args:
        path: the PNG to write.
        seconds: [S] when each step was trained, in order.
        rewards: [S] means.
        lags: [S] means.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = range(1, len(rewards) + 1)
    smooth = [
        sum(rewards[max(0, end - 5) : end]) / len(rewards[max(0, end - 5) : end]) for end in range(1, len(rewards) + 1)
    ]
    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(8, 5), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    upper.plot(steps, rewards, ".", color="#9db7d5", label="mean reward of a step")
    upper.plot(steps, smooth, color="#1f4e8c", label="mean of five steps")
    figure.suptitle(title)
    upper.set_ylabel("sampled reward")
    upper.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    lower.plot(steps, lags, color="#b0562c")
    lower.set_ylabel("mean lag\n(versions)")
    lower.set_xlabel(f"step of RL ({seconds[-1] - seconds[0]:,.0f} s between the first and the last)")
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_comparison(path: Path, title: str, columns: Mapping[str, Sequence[tuple[int, float, float]]]) -> None:
    """Draw metrics over steps, one panel each: recorded and replayed. Where any differ, those alone.

    Args:
        path: the PNG to write.
        columns: (step, recorded, replayed) by the metric's name, in order; at least one.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    other = {name: column for name, column in columns.items() if any(was != now for _, was, now in column)}
    columns = other or columns
    across = max(_PANELS, math.ceil(math.sqrt(len(columns))))
    rows = math.ceil(len(columns) / across)
    size = (2.8 * across, 1.8 * rows + 1.0)
    figure, panels = pyplot.subplots(rows, across, figsize=size, squeeze=False, layout="constrained")
    for axes in panels.flat[len(columns) :]:
        axes.remove()
    for axes, (name, column) in zip(panels.flat, columns.items(), strict=False):
        steps = [step for step, _, _ in column]
        axes.plot(steps, [was for _, was, _ in column], color="#9db7d5", linewidth=3, label="recorded")
        axes.plot(steps, [now for _, _, now in column], color="#1f4e8c", linewidth=1, label="replayed")
        axes.set_title(name, fontsize=9)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels.flat[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    figure.supxlabel("step", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
