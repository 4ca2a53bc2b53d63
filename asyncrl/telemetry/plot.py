"""The picture of a run: reward and lag over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_reward(path: Path, steps: Sequence[dict[str, Any]]) -> None:
    """Draw the mean reward of each RL step and its five-step mean over time, with the mean lag below.

    Args:
        path: the PNG to write.
        steps: dicts with "time_ns", "reward" and "lag", in order.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seconds = [(step["time_ns"] - steps[0]["time_ns"]) / 1e9 for step in steps]
    rewards = [step["reward"] for step in steps]
    smooth = [
        sum(rewards[max(0, end - 5) : end]) / len(rewards[max(0, end - 5) : end]) for end in range(1, len(rewards) + 1)
    ]
    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(8, 5), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    upper.plot(seconds, rewards, ".", color="#9db7d5", label="mean reward of a step")
    upper.plot(seconds, smooth, color="#1f4e8c", label="mean of five steps")
    upper.set_ylabel("sampled reward")
    upper.set_ylim(min(0.0, *rewards), max(1.0, *rewards) * 1.02)
    upper.legend(loc="lower right", frameon=False)
    lower.plot(seconds, [step["lag"] for step in steps], color="#b0562c")
    lower.set_ylabel("mean lag\n(versions)")
    lower.set_xlabel("seconds of RL")
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
