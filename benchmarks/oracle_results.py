"""Results of the runs of `asyncrl bench oracle`: as lines of a file, figures, a table and a plot."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.stage import BenchError

_GOAL, _WINDOW = 0.9, 5  # mean reward, over this many steps
SYNCHRONOUS = "synchronous"


class Curve(NamedTuple):
    """The steps of one run."""

    seed: int
    name: str  # `SYNCHRONOUS`, "lag 2" or "lag 2, uncorrected"
    bound: int  # of the lag
    rewards: list[float]  # means by step
    lags: list[float]  # means by step

    @property
    def reached(self) -> int | None:
        """Return the step at which the mean of the newest rewards reaches the goal; None if it never does."""
        return reached(self.rewards)


class Results:
    """A file with a line for the settings of all runs, then one for each curve, written as the run ends."""

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        """
        Raises:
            BenchError: the file has curves of other settings.
        """
        self._path = path
        self.curves: list[Curve] = []
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings) + "\n")
        first, *lines = path.read_text().splitlines()
        if json.loads(first) != settings:
            raise BenchError(f"{path} has curves of {first}, not of {json.dumps(settings)}: give another folder")
        self.curves = [Curve(**json.loads(line)) for line in lines]

    def add(self, curve: Curve) -> None:
        """Add a curve to the file."""
        self.curves.append(curve)
        with self._path.open("a") as file:
            file.write(json.dumps(curve._asdict()) + "\n")

    def lacks(self, seed: int, name: str) -> bool:
        """Return whether the file has no such curve."""
        return not any((curve.seed, curve.name) == (seed, name) for curve in self.curves)


def reached(rewards: Sequence[float]) -> int | None:
    """Return the first step, from 1, at which the mean of the last five rewards is at least 0.9."""
    ends = range(_WINDOW, len(rewards) + 1)
    return next((end for end in ends if statistics.fmean(rewards[end - _WINDOW : end]) >= _GOAL), None)


def figures(curves: Sequence[Curve]) -> dict[str, float]:
    """Return figures by bound, over the seeds with a loop; a run that never reached the goal counts as infinite."""
    found: dict[str, float] = {}
    loops = {curve.seed: curve for curve in curves if curve.name == SYNCHRONOUS}
    for name, own in _by_name(curves):
        pairs = [(curve, loops[curve.seed]) for curve in own if curve.seed in loops]
        if name == SYNCHRONOUS or not pairs:
            continue
        label = name.replace(", ", "_").replace(" ", "_")
        ratios = [(curve.reached or math.inf) / (loop.reached or math.nan) for curve, loop in pairs]
        found[f"{label}_seeds"] = len(ratios)
        found[f"{label}_steps_ratio"] = statistics.median(ratios)
        found[f"{label}_steps_ratio_least"], found[f"{label}_steps_ratio_most"] = median_interval(ratios)
        if own[0].bound:
            shares = [statistics.fmean(curve.lags) / curve.bound for curve in own if curve.lags]
            found[f"{label}_realised_share"] = statistics.median(shares)
        else:
            steps = [zip(curve.rewards, loop.rewards, strict=False) for curve, loop in pairs]
            found[f"{label}_reward_difference_max"] = max(abs(a - b) for pair in steps for a, b in pair)
            found[f"{label}_equal_steps"] = statistics.median(_equal_steps(curve, loop) for curve, loop in pairs)
    steps_of_loops = [loop.reached or math.inf for loop in loops.values()]
    return found | ({f"{SYNCHRONOUS}_steps": statistics.median(steps_of_loops)} if steps_of_loops else {})


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the narrowest pair of order statistics that covers the median with at least 95 %, else the extremes.

    The number of values below the median is binomial with p = 1/2 (David and Nagaraja, Order Statistics, 2003, section
    7.1). Of ten values, the second and the ninth cover the median with 97.9 %.
    """
    ordered, count = sorted(values), len(values)
    covered = [sum(math.comb(count, below) for below in range(k, count - k + 1)) / 2**count for k in range(1, count)]
    outer = max((k for k, share in enumerate(covered, 1) if share >= 0.95 and 2 * k <= count), default=1)
    return ordered[outer - 1], ordered[count - outer]


def markdown(curves: Sequence[Curve]) -> str:
    """Return the table of `docs/guides/algorithms.md`: medians over the seeds, with the interval of the median."""
    columns = ("run", "seeds", "mean lag", "steps to 0.9", "of the loop's", "seed by seed", "interval")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    found = figures(curves)
    of_loops = found.get(f"{SYNCHRONOUS}_steps", math.nan)
    for name, own in _by_name(curves):
        label = name.replace(", ", "_").replace(" ", "_")
        lag = statistics.median(statistics.fmean(curve.lags) for curve in own)
        steps = statistics.median(curve.reached or math.inf for curve in own)
        ratio, least, most = (found.get(f"{label}_steps_ratio{end}", 1.0) for end in ("", "_least", "_most"))
        of_loop = "1 | " if name == SYNCHRONOUS else f"{_cell(ratio)} | {_cell(least)} to {_cell(most)}"
        lines.append(f"| {name} | {len(own)} | {lag:.2f} | {_cell(steps, 0)} | {_cell(steps / of_loops)} | {of_loop} |")
    return "\n".join(lines) + "\n"


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw the median reward by step of each kind of run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    bounds = sorted({curve.bound for curve in curves})
    for name, own in _by_name(curves):
        rewards = [curve.rewards for curve in own]
        # Runs end at the goal: a median over the remaining runs would be a median over slow runs.
        most = sorted(map(len, rewards))[len(rewards) // 2]
        ended = [[*one, *[_GOAL] * (most - len(one))] for one in rewards]
        medians = [statistics.median(one[step] for one in ended) for step in range(most)]
        style = ":" if name == SYNCHRONOUS else "--" if "uncorrected" in name else "-"
        color = "black" if name == SYNCHRONOUS else f"C{bounds.index(own[0].bound)}"
        axes.plot(range(1, most + 1), medians, label=name, color=color, linestyle=style)
    axes.axhline(_GOAL, color="gray", linewidth=0.5)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward, median over the seeds")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _by_name(curves: Sequence[Curve]) -> list[tuple[str, list[Curve]]]:
    """Return the curves of each kind: the loop first, then by bound."""
    order = sorted(curves, key=lambda curve: (curve.name != SYNCHRONOUS, curve.bound, curve.name, curve.seed))
    names = dict.fromkeys(curve.name for curve in order)
    return [(name, [curve for curve in order if curve.name == name]) for name in names]


def _equal_steps(curve: Curve, loop: Curve) -> int:
    """Return the number of first steps whose rewards are bit-equal."""
    pairs = list(zip(curve.rewards, loop.rewards, strict=False))
    return next((number for number, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _cell(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "not reached"
