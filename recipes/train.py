"""Train a recipe: several variants and seeds, each run pinned to its own cores.

    .venv/bin/python recipes/train.py sums-cpu --variant asynchronous:buffer.max_lag=2 --seeds 1 2 3 --parallel 1

A recipe is a folder with `recipe.toml`, or the name of a config of asyncrl (`sums-cpu` trains `sums`). Each run writes
`results/VARIANT-SEED.json` as soon as it ends; a run whose file exists is not repeated. `figures.json` and `curve.png`
are then made again from all files in `results`.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.telemetry.metric_names import name_of, named

HERE = Path(__file__).parent
SHIPPED = {"sums-cpu": "sums"}  # recipes that train a config of asyncrl
COLORS = ("#1f4e8c", "#b0562c", "#3c7a3f", "#7a4a8c", "#8a7a1f", "#444444")
STEP = ("step", "reward_mean", "time_s", "train_s", "wait_s", "lag_mean_versions")


class Variant(NamedTuple):
    """Settings by which some runs of a recipe differ."""

    name: str
    settings: list[str]


def variant_of(word: str) -> Variant:
    """Read `NAME` or `NAME:KEY=VALUE,KEY=VALUE`."""
    name, _, settings = word.partition(":")
    return Variant(name, settings.split(",") if settings else [])


def arguments_of(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("recipe", help="a folder of this folder, such as tools")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--variant", type=variant_of, action="append", default=[], metavar="NAME:KEY=VALUE", help="default: recipe"
    )
    parser.add_argument("--parallel", type=int, default=1, help="runs at once")
    parser.add_argument("--cores-each", type=int, default=2, help="cores that taskset gives each run (default: 2)")
    parser.add_argument("--first-core", type=int, default=0, help="the first core that is used (default: 0)")
    parser.add_argument("--model", default="", help="directory of the model (default: asyncrl fetches it)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop a run after so long; its steps count")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting of all runs"
    )
    parser.add_argument("--output", type=Path, help="folder of results, figures and curve (default: the recipe's)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs' directories")
    given = parser.parse_args(words)
    given.output = given.output or HERE / given.recipe
    given.variant = given.variant or [Variant("recipe", [])]
    return given


def result_at(given: argparse.Namespace, variant: Variant, seed: int) -> Path:
    """Return the file of a run's result."""
    return Path(given.output) / "results" / f"{variant.name}-{seed}.json"


def train(variant: Variant, seed: int, cores: range, given: argparse.Namespace) -> str:
    """Train once; returns a line about the result, which is stored."""
    config = SHIPPED.get(given.recipe) or str(HERE / given.recipe / "recipe.toml")
    settings = [*variant.settings, *given.set]
    own = [f"run={given.recipe}-{variant.name}-{seed}", f"seed={seed}", f"directory={given.runs}", *settings]
    own += [f"model.path={Path(given.model).resolve()}"] if given.model else []
    command = ["taskset", "--cpu-list", f"{cores.start}-{cores.stop - 1}", sys.executable, "-m", "asyncrl.cli.main"]
    command += ["up", config, *(word for setting in own for word in ("--set", setting))]
    log = given.output / "results" / f"{variant.name}-{seed}.log"
    with log.open("w") as output:
        code = end_of(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), given.limit)
    root = next(
        (Path(line.split(" in ", 1)[1]) for line in log.read_text().splitlines() if line.startswith("run ")), None
    )
    if code or root is None:
        return f"{variant.name} seed {seed}: failed with exit code {code}; see {log}"
    result = result_of(root, variant.name, seed, settings)
    result_at(given, variant, seed).write_text(json.dumps(result) + "\n")
    last = result["steps"][-1]
    return f"{variant.name} seed {seed}: reward {last['reward_mean']:.3f} after {last['time_s']:.0f} s"


def end_of(process: subprocess.Popen[bytes], limit: float | None) -> int:
    """Wait for the end of a run, or stop it at the limit; returns its exit code, 0 where it was stopped."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        return 0


def result_of(root: Path, variant: str, seed: int, settings: list[str]) -> dict[str, Any]:
    """Read the figures of a run from its metrics."""
    rows = [named(json.loads(line)) for line in (root / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["event"] == "step" and row["stage"] == "rl"]
    evaluations = sorted((row for row in rows if row["event"] == "eval"), key=lambda row: int(row["version"]))
    keys = [*STEP, *(key for key in steps[0] if key.startswith("task/") and key.endswith("/reward_mean"))]
    return {
        "variant": variant,
        "seed": seed,
        "settings": settings,
        "evaluations": [{key: row[key] for key in ("version", "accuracy", "time_s", "prompts")} for row in evaluations],
        "steps": [{key: row[name_of(key)] for key in keys if name_of(key) in row} for row in steps],
    }


def seconds_a_step(result: dict[str, Any]) -> float:
    """Return the mean seconds between two steps, from the first to the last."""
    steps = result["steps"]
    return float(steps[-1]["time_s"] - steps[0]["time_s"]) / max(1, len(steps) - 1)


def figures_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of each variant: of every seed in order, and medians. Rewards are means of five steps."""
    found: dict[str, Any] = {}
    for variant in sorted({one["variant"] for one in results}):
        own = sorted((one for one in results if one["variant"] == variant), key=lambda one: int(one["seed"]))
        rewards = [[step["reward_mean"] for step in one["steps"]] for one in own]
        columns = {
            "reward_first": [round(statistics.fmean(one[:5]), 4) for one in rewards],
            "reward_last": [round(statistics.fmean(one[-5:]), 4) for one in rewards],
            "seconds_a_step": [round(seconds_a_step(one), 2) for one in own],
            "seconds": [round(one["steps"][-1]["time_s"]) for one in own],
        }
        if all(one["evaluations"] for one in own):
            columns["accuracy_before"] = [one["evaluations"][0]["accuracy"] for one in own]
            columns["accuracy_last"] = [one["evaluations"][-1]["accuracy"] for one in own]
        found[variant] = {
            "seeds": [one["seed"] for one in own],
            "settings": own[0]["settings"],
            "steps": [len(one["steps"]) for one in own],
            **columns,
            **{f"{name}_median": statistics.median(values) for name, values in columns.items()},
        }
    return found


def curves_of(results: list[dict[str, Any]], *, by_step: bool) -> dict[str, list[tuple[list[float], list[float]]]]:
    """Return minutes or steps, and sampled rewards, by label: of each task where a run has several, else of each
    variant.
    """
    found: dict[str, list[tuple[list[float], list[float]]]] = {}
    several = are_several(results)
    for one in results:
        tasks = sorted({key for step in one["steps"] for key in step if key.startswith("task/")})
        for key in tasks or ["reward_mean"]:
            label = " ".join([*key.split("/")[1:2], *[one["variant"]] * (several or not tasks)])
            steps = [step for step in one["steps"] if key in step]
            rewards = [step[key] for step in steps]
            smooth = [statistics.fmean(rewards[max(0, end - 5) : end]) for end in range(1, len(rewards) + 1)]
            places = [step["step"] if by_step else step["time_s"] / 60 for step in steps]
            found.setdefault(label, []).append((places, smooth))
    return found


def are_several(results: list[dict[str, Any]]) -> bool:
    """Return whether the results are of more than one variant."""
    return len({one["variant"] for one in results}) > 1


def draw(path: Path, results: list[dict[str, Any]]) -> None:
    """Draw sampled reward and held-out accuracy of every run over time; of several variants the reward by step, too."""
    import matplotlib
    from PIL import Image

    matplotlib.use("Agg")
    from matplotlib import pyplot

    evaluated = any(len(one["evaluations"]) > 1 for one in results)
    rewards = [False, True] if are_several(results) else [False]
    count = len(rewards) + evaluated
    figure, panels = pyplot.subplots(1, count, figsize=(9, 3.6), layout="constrained", squeeze=False)
    left = panels[0][0]
    for axes, by_step in zip(panels[0], rewards, strict=False):
        draw_rewards(axes, results, by_step=by_step)
    if evaluated:
        draw_evaluations(panels[0][-1], results)
    for axes in panels[0]:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, loc="best", fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    with Image.open(path) as image:
        image.quantize(64).save(path, optimize=True)


def draw_rewards(axes: Any, results: list[dict[str, Any]], *, by_step: bool) -> None:
    """Draw the sampled reward of every run, by step or by time."""
    for number, (label, lines) in enumerate(curves_of(results, by_step=by_step).items()):
        for run, (places, rewards) in enumerate(lines):
            color = COLORS[number % len(COLORS)]
            axes.plot(places, rewards, color=color, alpha=0.7, label=label if run == 0 else None)
    axes.set_xlabel("step" if by_step else "minutes since the start")
    axes.set_ylabel("sampled reward, mean of five steps")


def draw_evaluations(axes: Any, results: list[dict[str, Any]]) -> None:
    """Draw the held-out accuracy of every run over time."""
    for number, variant in enumerate(sorted({one["variant"] for one in results})):
        for one in (result for result in results if result["variant"] == variant):
            minutes = [row["time_s"] / 60 for row in one["evaluations"]]
            accuracies = [row["accuracy"] for row in one["evaluations"]]
            axes.plot(minutes, accuracies, ".-", color=COLORS[number % len(COLORS)], alpha=0.7)
    axes.set_xlabel("minutes since the start")
    axes.set_ylabel("held-out accuracy, greedy")
    axes.set_ylim(-0.02, 1.02)


def summarize(output: Path) -> None:
    """Write figures and curve of all stored results."""
    results = [json.loads(file.read_text()) for file in sorted((output / "results").glob("*.json"))]
    if results:
        (output / "figures.json").write_text(json.dumps(figures_of(results), indent=1) + "\n")
        draw(output / "curve.png", results)


def main(words: list[str]) -> int:
    """Run what has no result yet; returns 1 where a run failed."""
    given = arguments_of(words)
    (given.output / "results").mkdir(parents=True, exist_ok=True)
    cores = queue.Queue[range]()
    for place in range(given.parallel):
        first = given.first_core + place * given.cores_each
        cores.put(range(first, first + given.cores_each))
    if given.first_core + given.parallel * given.cores_each > (os.cpu_count() or 1):
        print(f"--parallel {given.parallel} needs more cores than there are: {os.cpu_count()}", file=sys.stderr)
        return 2

    def work(variant: Variant, seed: int) -> bool:
        mine = cores.get()
        try:
            line = train(variant, seed, mine, given)
        finally:
            cores.put(mine)
        print(line, flush=True)
        return result_at(given, variant, seed).exists()

    wanted = [(variant, seed) for seed in given.seeds for variant in given.variant]
    missing = [one for one in wanted if not result_at(given, *one).exists()]
    with ThreadPoolExecutor(given.parallel) as pool:
        succeeded = list(pool.map(lambda one: work(*one), missing))
    summarize(given.output)
    return 0 if all(succeeded) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
