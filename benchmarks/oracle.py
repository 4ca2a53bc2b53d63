"""Rewards by step of asynchronous runs, beside those of a synchronous loop that begins with the same weights.

All begin with the weights of one warm-up; a seed orders prompts and draws tokens. One run is without lag and must
follow the loop step by step; others have a bound of the lag, with the correction of off-policy tokens and without. A
rollout waits after it has sampled until its batch comes next, and everything issued has been sampled: the lag is then
at its bound.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncrl.config.load import load_config
from asyncrl.config.settings import Config
from asyncrl.process import python
from benchmarks.stage import BenchError, report
from benchmarks.synchronous import Synchronous

_GOAL, _WINDOW = 0.9, 5  # mean reward, over so many steps
_LOOK_S = 0.2
_DEADLINE_S = 3600.0  # of one run, however loaded the machine is
_MODULE = """
import asyncio
import re
import time
from pathlib import Path

METRICS, LAG, GROUPS, MEMBERS = Path({metrics!r}), {lag}, {groups}, {members}  # of the run; of a batch
STEP = re.compile(rb'"step":(\\d+),"stage":"rl"')
places, gates, sampled, watcher = {{}}, {{}}, 0, None

def newest():
    if not METRICS.exists():
        return 0
    with METRICS.open("rb") as file:
        file.seek(max(file.seek(0, 2) - 65536, 0))
        return max(map(int, STEP.findall(file.read())), default=0)

async def watch():
    changed, before = time.monotonic(), -1
    while gates:
        version = newest()
        if version > before:
            changed, before = time.monotonic(), version
        due = [one for one in gates if (one - GROUPS // 4) // GROUPS <= version]
        # Near the end of a run less is issued than is waited for; and others are issued for groups that were dropped.
        late = time.monotonic() > changed + 30
        if late:
            changed, due = time.monotonic(), due or sorted(gates)[:GROUPS]
        # Everything that may be issued before the next step is sampled.
        if late or sampled >= (version + LAG + 1) * GROUPS * MEMBERS:
            for place in due:
                gates.pop(place).set()
        await asyncio.sleep(0.05)

async def rollout(row, context):
    global sampled, watcher
    await context.generate(context.tokenizer.encode_prompt(row, max_tokens=None))
    sampled += 1
    gate = gates.setdefault(places.setdefault(row.prompt, len(places)), asyncio.Event())
    if watcher is None or watcher.done():
        watcher = asyncio.create_task(watch())
    await context.tool("wait", gate.wait)
"""


class Curve(NamedTuple):
    """The steps of one run."""

    seed: int
    name: str  # "synchronous", "lag 2" or "lag 2, uncorrected"
    bound: int  # of the lag
    rewards: list[float]  # means by step
    lags: list[float]  # means by step

    @property
    def reached(self) -> int | None:
        """The step at which the mean of the newest rewards is at the goal; None: never."""
        return reached(self.rewards)


class Plan(NamedTuple):
    """Everything that is measured."""

    config: str
    lags: Sequence[int]
    uncorrected: Sequence[int]  # lags that are measured without correction, too
    seeds: Sequence[int]
    settings: Sequence[str]  # KEY=VALUE of all runs


async def bench_oracle(*, jobs: int, output: str, settings: list[str], **options: Any) -> dict[str, float]:
    """Measure, write all curves to `output`/oracle.json and draw them.

    Args:
        jobs: runs at once; each keeps about two cores busy.
        output: folder; "" for none.
        settings: KEY=VALUE of all runs.
        options: the other fields of `Plan`.

    Returns:
        For each bound: medians over the seeds of the steps to a mean reward of 0.9 as a share of the loop's, their
        extremes, the realised lag as a share of the bound; and the greatest difference of a reward at lag 0.

    Raises:
        BenchError: a run failed.
    """
    config = options.pop("config")
    config = str(Path.cwd() / config) if config.endswith(".toml") else config  # each run has a folder of its own
    plan = Plan(config, settings=[*settings, "rollout.seeded=true", "eval.prompts=0"], **options)
    curves: list[Curve] = []

    def keep(curve: Curve) -> None:
        curves.append(curve)
        if output:
            _write(curves, Path(output))
        lag = f", mean lag {statistics.fmean(curve.lags):.2f}" if curve.bound else ""
        report(f"seed {curve.seed}: {curve.name} reaches {_GOAL} at step {curve.reached}{lag}")

    with tempfile.TemporaryDirectory(prefix="asyncrl-oracle-") as scratch, ProcessPoolExecutor(jobs) as pool:
        base = Path(scratch)
        await _run(base, "base", ["up", plan.config, *_words([*plan.settings, "run=base", "learner.steps=0"])])
        at_once = asyncio.Semaphore(jobs)
        async with asyncio.TaskGroup() as group:
            for seed in plan.seeds:
                group.create_task(_of_seed(plan, seed, base, pool, at_once, keep))
    return figures(curves)


def reached(rewards: Sequence[float]) -> int | None:
    """The first step, from 1, at which the mean of the last five rewards is at least 0.9."""
    ends = range(_WINDOW, len(rewards) + 1)
    return next((end for end in ends if statistics.fmean(rewards[end - _WINDOW : end]) >= _GOAL), None)


def figures(curves: Sequence[Curve]) -> dict[str, float]:
    """The figures of `bench_oracle`. A run that never reached the goal counts as infinitely many steps."""
    found: dict[str, float] = {}
    loops = {curve.seed: curve for curve in curves if curve.name == "synchronous"}
    for name in dict.fromkeys(curve.name for curve in curves if curve.name != "synchronous"):
        own = [curve for curve in curves if curve.name == name]
        label = name.replace(", ", "_").replace(" ", "_")
        ratios = [(curve.reached or float("inf")) / (loops[curve.seed].reached or float("nan")) for curve in own]
        found[f"{label}_steps_ratio"] = statistics.median(ratios)
        found[f"{label}_steps_ratio_least"], found[f"{label}_steps_ratio_most"] = min(ratios), max(ratios)
        if own[0].bound:
            shares = [statistics.fmean(curve.lags) / curve.bound for curve in own if curve.lags]
            found[f"{label}_realised_share"] = statistics.median(shares)
        else:
            pairs = [zip(curve.rewards, loops[curve.seed].rewards, strict=False) for curve in own]
            found[f"{label}_reward_difference_max"] = max(abs(a - b) for pair in pairs for a, b in pair)
    steps = [curve.reached for curve in loops.values() if curve.reached]
    found["synchronous_steps"] = statistics.median(steps) if steps else float("inf")
    return found


async def _of_seed(
    plan: Plan,
    seed: int,
    base: Path,
    pool: ProcessPoolExecutor,
    at_once: asyncio.Semaphore,
    keep: Callable[[Curve], None],
) -> None:
    own = [*plan.settings, f"seed={seed}"]

    async def loop() -> None:
        running = asyncio.get_running_loop().run_in_executor(
            pool, synchronous, plan.config, own, base / "runs" / "base"
        )
        rewards = await running
        keep(Curve(seed, "synchronous", 0, rewards, [0.0] * len(rewards)))

    async def fork(curve: Curve, further: list[str]) -> None:
        keep(await _forked(plan, curve, further, base))

    wanted = [loop()]
    wanted += [fork(Curve(seed, f"lag {lag}", lag, [], []), []) for lag in plan.lags]
    plain = ['learner.loss_options={ correction = "none" }']
    wanted += [fork(Curve(seed, f"lag {lag}, uncorrected", lag, [], []), plain) for lag in plan.uncorrected]

    async def one(measuring: Coroutine[Any, Any, None]) -> None:
        async with at_once:
            await measuring

    async with asyncio.TaskGroup() as group:
        for measuring in wanted:
            group.create_task(one(measuring))


async def _forked(plan: Plan, curve: Curve, further: list[str], base: Path) -> Curve:
    """A run from the weights of the base, until it has reached the goal."""
    loaded = load_config(plan.config, overrides=plan.settings).config
    lag, run = curve.bound, f"seed-{curve.seed}-{curve.name}".replace(", ", "-").replace(" ", "-")
    groups, members = loaded.buffer.batch_groups, loaded.rollout.group_size
    module = base / f"{run.replace('-', '_')}.py"
    module.write_text(
        _MODULE.format(metrics=str(base / "runs" / run / "metrics.jsonl"), lag=lag, groups=groups, members=members)
    )
    settings = [*settings_of(loaded, lag, f"{module}:rollout"), f"seed={curve.seed}", *further]
    await _run(base, run, ["fork", "base", run, "--at", "0", *_words(settings)], until_reached=True)
    steps = _steps(base / "runs" / run)
    lags = [row["lag_mean_versions"] for row in steps]
    return curve._replace(rewards=[row["reward_mean"] for row in steps], lags=lags)


def settings_of(config: Config, lag: int, rollout: str) -> list[str]:
    """Settings, KEY=VALUE, of a run whose rollouts wait until their tokens have a lag."""
    slots = config.buffer.batch_groups * config.rollout.group_size * (lag + 1)
    settings = [f"learner.steps={config.learner.steps}", f"buffer.max_lag={lag}", f"rollout.slots={slots}"]
    settings += [f"learner.keep_versions={max(lag + 2, config.learner.keep_versions)}"]
    # A rollout waits for all batches before its own, however long they take.
    limits = [f"rollout.tool_limit_s={_DEADLINE_S}", f"buffer.group_deadline_s={2 * _DEADLINE_S}"]
    return [*settings, f"task.rollout={rollout}", *limits] if lag else settings


def synchronous(config: str, settings: Sequence[str], run: Path) -> list[float]:
    """Rewards by step of the loop, from the weights after the warm-up of a run, until it has reached the goal."""
    torch.set_num_threads(1)
    loaded = load_config(config, overrides=settings).config
    (checkpoint,) = (run / "checkpoints").glob("step000000-*")
    loop = Synchronous(loaded, run / "model", checkpoint)
    rewards: list[float] = []
    while len(rewards) < loaded.learner.steps and not reached(rewards):
        rewards.append(loop.step(len(rewards) + 1))
    return rewards


def _words(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


async def _run(folder: Path, name: str, words: list[str], *, until_reached: bool = False) -> None:
    """Run a command of asyncrl in a folder, and end the run early once it has reached the goal, if that is wanted."""
    process = await asyncio.create_subprocess_exec(
        *python("-m", "asyncrl.cli.main", *words),
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    ending, interrupted = asyncio.create_task(process.communicate()), False
    try:
        async with asyncio.timeout(_DEADLINE_S):
            while not ending.done():
                await asyncio.wait({ending}, timeout=_LOOK_S)
                if (
                    until_reached
                    and not interrupted
                    and reached([row["reward_mean"] for row in _steps(folder / "runs" / name)])
                ):
                    process.send_signal(signal.SIGINT)
                    interrupted = True
    finally:
        if not ending.done():
            process.send_signal(signal.SIGINT)
        _, error = await ending
    if process.returncode and not interrupted:
        raise BenchError(f"asyncrl {' '.join(words)} ended with {process.returncode}: {error.decode()[-2000:]}")


def _steps(run: Path) -> list[dict[str, float]]:
    try:
        lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]  # the last one may be half written
    except FileNotFoundError:
        return []
    return [row for row in map(json.loads, lines) if row["event"] == "step" and row["stage"] == "rl"]


def _write(curves: Sequence[Curve], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "oracle.json").write_text(json.dumps([curve._asdict() for curve in curves]) + "\n")
    _draw(curves, folder / "oracle.png")


def _draw(curves: Sequence[Curve], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(curve.name for curve in curves))
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for number, name in enumerate(names):
        own = [curve.rewards for curve in curves if curve.name == name]
        most = max(map(len, own))
        medians = [statistics.median(rewards[step] for rewards in own if step < len(rewards)) for step in range(most)]
        dashed = "uncorrected" in name
        axes.plot(range(1, most + 1), medians, label=name, color=f"C{number % 10}", linestyle="--" if dashed else "-")
    axes.axhline(_GOAL, color="gray", linewidth=0.5)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward, median over the seeds")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
