"""Run the recipe: several seeds, asynchronous and synchronous, each run pinned to its own cores.

    .venv/bin/python recipes/sums-cpu/run.py --seeds 1 2 3 4 5 --parallel 1

Each run writes `results/MODE-SEED.json` as soon as it ends; a run whose file exists is not repeated. `figures.json` and
`curve.png` are then made again from all files in `results`.
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
from typing import Any

HERE = Path(__file__).parent
MODES = {"asynchronous": 2, "synchronous": 0}  # greatest lag in versions
COLORS = {"asynchronous": "#1f4e8c", "synchronous": "#b0562c"}
GOAL = 0.9  # held-out accuracy
STEP = ("step", "reward_mean", "time_s", "train_s", "wait_s", "lag_mean_versions")


def arguments_of(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--parallel", type=int, default=1, help="runs at once")
    parser.add_argument("--cores-each", type=int, default=2, help="cores that taskset gives each run (default: 2)")
    parser.add_argument("--first-core", type=int, default=0, help="the first core that is used (default: 0)")
    parser.add_argument("--model", default="", help="directory of the model (default: asyncrl fetches it)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop a run after so long; its steps count")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting of all runs"
    )
    parser.add_argument("--output", type=Path, default=HERE, help="folder of results, figures and curve")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs' directories")
    return parser.parse_args(words)


def result_at(given: argparse.Namespace, mode: str, seed: int) -> Path:
    """Return the file of a run's result."""
    return Path(given.output) / "results" / f"{mode}-{seed}.json"


def train(mode: str, seed: int, cores: range, given: argparse.Namespace) -> str:
    """Train once; returns a line about the result, which is stored."""
    name = f"sums-{mode}-{seed}"
    own = [f"run={name}", f"seed={seed}", f"buffer.max_lag={MODES[mode]}", f"directory={given.runs}", *given.set]
    own += [f"model.path={Path(given.model).resolve()}"] if given.model else []
    command = ["taskset", "--cpu-list", f"{cores.start}-{cores.stop - 1}", sys.executable, "-m", "asyncrl.cli.main"]
    command += ["up", "sums", *(word for setting in own for word in ("--set", setting))]
    log = given.output / "results" / f"{mode}-{seed}.log"
    with log.open("w") as output:
        code = end_of(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), given.limit)
    root = next(
        (Path(line.split(" in ", 1)[1]) for line in log.read_text().splitlines() if line.startswith("run ")), None
    )
    if code or root is None:
        return f"{mode} seed {seed}: failed with exit code {code}; see {log}"
    result = result_of(root, mode, seed, given.set)
    result_at(given, mode, seed).write_text(json.dumps(result) + "\n")
    last = result["evaluations"][-1]
    return f"{mode} seed {seed}: accuracy {last['accuracy']:.3f} after {last['time_s']:.0f} s"


def end_of(process: subprocess.Popen[bytes], limit: float | None) -> int:
    """Wait for the end of a run, or stop it at the limit; returns its exit code, 0 where it was stopped."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        return 0


def result_of(root: Path, mode: str, seed: int, settings: list[str]) -> dict[str, Any]:
    """Read the figures of a run from its metrics."""
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["event"] == "step" and row["stage"] == "rl"]
    evaluations = sorted((row for row in rows if row["event"] == "eval"), key=lambda row: int(row["version"]))
    return {
        "mode": mode,
        "seed": seed,
        "settings": settings,
        "evaluations": [{key: row[key] for key in ("version", "accuracy", "time_s", "prompts")} for row in evaluations],
        "steps": [{key: row[key] for key in STEP} for row in steps],
    }


def seconds_a_step(result: dict[str, Any]) -> float:
    """Return the mean seconds between two steps, from the first to the last."""
    steps = result["steps"]
    return float(steps[-1]["time_s"] - steps[0]["time_s"]) / max(1, len(steps) - 1)


def seconds_to_goal(result: dict[str, Any]) -> float | None:
    """Return the seconds until an evaluation first reached the goal; None where none did."""
    return next((row["time_s"] for row in result["evaluations"] if row["accuracy"] >= GOAL), None)


def figures_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of each mode: of every seed in order, and medians."""
    found: dict[str, Any] = {}
    for mode in MODES:
        own = sorted((one for one in results if one["mode"] == mode), key=lambda one: int(one["seed"]))
        if not own:
            continue
        columns = {
            "accuracy_before": [one["evaluations"][0]["accuracy"] for one in own],
            "accuracy_last": [one["evaluations"][-1]["accuracy"] for one in own],
            "seconds_a_step": [round(seconds_a_step(one), 2) for one in own],
            "seconds": [round(one["steps"][-1]["time_s"]) for one in own],
        }
        found[mode] = {
            "seeds": [one["seed"] for one in own],
            "settings": own[0]["settings"],
            "steps": [len(one["steps"]) for one in own],
            "last_evaluation": [one["evaluations"][-1]["version"] for one in own],
            **columns,
            **{f"{name}_median": statistics.median(values) for name, values in columns.items()},
            f"seconds_to_{GOAL}": [seconds_to_goal(one) for one in own],
        }
    return found


def draw(path: Path, results: list[dict[str, Any]]) -> None:
    """Draw sampled reward and held-out accuracy of every run over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for mode, color in COLORS.items():
        for number, one in enumerate(result for result in results if result["mode"] == mode):
            label = mode if number == 0 else None
            steps, evaluations = one["steps"], one["evaluations"]
            rewards = [step["reward_mean"] for step in steps]
            smooth = [statistics.fmean(rewards[max(0, end - 5) : end]) for end in range(1, len(rewards) + 1)]
            left.plot([step["time_s"] / 60 for step in steps], smooth, color=color, alpha=0.6, label=label)
            times = [row["time_s"] / 60 for row in evaluations]
            right.plot(times, [row["accuracy"] for row in evaluations], ".-", color=color, alpha=0.6, label=label)
    left.set_ylabel("sampled reward, mean of five steps")
    right.set_ylabel("held-out accuracy, greedy")
    right.axhline(GOAL, color="#888888", linewidth=0.8, linestyle=":")
    for axes in (left, right):
        axes.set_xlabel("minutes since the start")
        axes.set_ylim(-0.02, 1.02)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


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

    def work(mode: str, seed: int) -> bool:
        mine = cores.get()
        try:
            line = train(mode, seed, mine, given)
        finally:
            cores.put(mine)
        print(line, flush=True)
        return result_at(given, mode, seed).exists()

    wanted = [(mode, seed) for seed in given.seeds for mode in given.modes]
    missing = [one for one in wanted if not result_at(given, *one).exists()]
    with ThreadPoolExecutor(given.parallel) as pool:
        succeeded = list(pool.map(lambda one: work(*one), missing))
    summarize(given.output)
    return 0 if all(succeeded) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
