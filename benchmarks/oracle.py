"""Rewards by step of asynchronous runs, compared with a synchronous loop that begins with the same weights.

All runs begin with the weights of one warm-up; a seed orders prompts and draws tokens. The run without lag must follow
the loop step by step. Other runs have a lag bound, with and without off-policy correction. After sampling, a rollout
waits until its batch is next and everything issued has been sampled. The mean lag is then a chosen share of its bound.
A file keeps the results of completed runs; they are not measured again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config.load import load_config
from asyncrl.config.settings import Config
from asyncrl.process import python, with_parent
from asyncrl.telemetry.metric_names import named
from benchmarks.clone import ROOT, environment
from benchmarks.oracle_results import SYNCHRONOUS, Curve, Results, draw, figures, markdown, reached
from benchmarks.oracle_run import write_rollout
from benchmarks.stage import BenchError, report

_POLL_S = 0.5
_LAG_SHARE = 0.76  # target of the mean lag, as a share of the bound
_BUFFERED = 0.22  # of a batch: groups that wait in the buffer add to the lag of the rollouts that wait
_DEADLINE_S = 3600.0  # of one run, also on a loaded machine


class Plan(NamedTuple):
    """The settings of the measurement."""

    config: str
    lags: Sequence[int]
    uncorrected: Sequence[int]  # lags that are also measured without correction
    seeds: Sequence[int]
    settings: Sequence[str]  # KEY=VALUE for all runs


class _Measuring(NamedTuple):
    """Parts that all runs of the measurement share."""

    plan: Plan
    base: Path  # the run whose weights all runs begin with
    scratch: Path
    results: Results


async def bench_oracle(
    *, jobs: int, output: str | None, limit_s: float, settings: list[str], **options: Any
) -> dict[str, float]:
    """Measure the runs that `output`/oracle.jsonl lacks, then write oracle.md and oracle.png there.

    Args:
        jobs: number of concurrent runs; each uses one to two cores.
        output: absolute path of a folder, which also keeps the base run; None for a temporary one.
        limit_s: seconds after which unfinished runs are stopped; 0 for no limit.
        settings: KEY=VALUE for all runs.
        options: the other fields of `Plan`.

    Returns:
        For each bound: steps to a mean reward of 0.9 as a share of the loop's, and the realised lag as a share of the
        bound. Figures are medians over the seeds, with intervals. Also the greatest difference of a reward at lag 0.

    Raises:
        BenchError: the folder has curves of other settings, or no run could begin.
    """
    given = options.pop("config")
    config = str(Path.cwd() / given) if given.endswith(".toml") else given  # runs have another working folder
    plan = Plan(config, settings=[*settings, "rollout.seeded=true", "eval.prompts=0"], **options)
    with tempfile.TemporaryDirectory(prefix="asyncrl-oracle-") as scratch:
        folder = Path(output or scratch)
        results = Results(
            folder / "oracle.jsonl", {"config": given, "settings": list(plan.settings), "lag_share": _LAG_SHARE}
        )
        measuring = _Measuring(plan, folder / "base", Path(scratch), results)
        missing = [curve for curve in _wanted(plan) if results.lacks(curve.seed, curve.name)]
        try:
            async with asyncio.timeout(limit_s or None):
                await _measure(measuring, missing, jobs)
        except TimeoutError:
            left = sum(results.lacks(curve.seed, curve.name) for curve in missing)
            report(f"{left} runs are missing after {limit_s:.0f} s: the same command measures them")
        if results.curves:
            (folder / "oracle.md").write_text(markdown(results.curves))
            draw(results.curves, folder / "oracle.png")
            report(markdown(results.curves))
    return figures(results.curves)


def _wanted(plan: Plan) -> list[Curve]:
    """Return the curves to measure, seed by seed, longest first."""
    curves = []
    for seed in plan.seeds:
        curves += [Curve(seed, f"lag {lag}, uncorrected", lag, [], []) for lag in sorted(plan.uncorrected)[::-1]]
        curves += [Curve(seed, f"lag {lag}", lag, [], []) for lag in sorted(plan.lags)[::-1]]
        curves.append(Curve(seed, SYNCHRONOUS, 0, [], []))
    return curves


async def _measure(measuring: _Measuring, missing: Sequence[Curve], jobs: int) -> None:
    if missing and not (measuring.base / "summary.json").exists():
        shutil.rmtree(measuring.base, ignore_errors=True)  # of a run that was stopped
        own = [*measuring.plan.settings, "run=base", "learner.steps=0", f"directory={measuring.base.parent}"]
        words = [word for setting in own for word in ("--set", setting)]
        async with _process("-m", "asyncrl.cli.main", "up", measuring.plan.config, *words) as running:
            await _done(running)
    waiting = iter(missing)

    async def work() -> None:
        for curve in waiting:
            run = _synchronous if curve.name == SYNCHRONOUS else _forked
            try:
                made = await run(measuring, curve)
            except BenchError as error:  # this run is missing then; the others count
                report(f"seed {curve.seed}: {curve.name} failed: {error}")
                continue
            measuring.results.add(made)
            lag = f", mean lag {statistics.fmean(made.lags):.2f}" if made.bound else ""
            report(f"seed {made.seed}: {made.name} reaches 0.9 at step {made.reached}{lag}")

    async with asyncio.TaskGroup() as group:
        for _ in range(jobs):
            group.create_task(work())


async def _synchronous(measuring: _Measuring, curve: Curve) -> Curve:
    own = [*measuring.plan.settings, f"seed={curve.seed}"]
    words = ["-m", "benchmarks.synchronous", measuring.plan.config, str(measuring.base), *own]
    async with _process(*words) as running:
        rewards = json.loads(await _done(running))
    return curve._replace(rewards=rewards, lags=[0.0] * len(rewards))


async def _forked(measuring: _Measuring, curve: Curve) -> Curve:
    """Run from the weights of the base until the goal is reached."""
    plan, lag, name = measuring.plan, curve.bound, curve.name.replace(", ", "-").replace(" ", "-")
    folder = measuring.scratch / f"{curve.seed}-{name}"
    folder.mkdir()
    loaded, run = load_config(plan.config, overrides=plan.settings).config, folder / name
    write_rollout(folder / "rollout.py", loaded, slots_of(loaded, lag), run / "metrics.jsonl")
    own = [*settings_of(loaded, lag, f"{folder}/rollout.py:rollout"), f"seed={curve.seed}", f"run={name}"]
    own += ['learner.loss_options={ correction = "none" }'] if "uncorrected" in curve.name else []
    async with _process("-m", "benchmarks.oracle_run", str(measuring.base), str(folder), *own) as running:
        ending = asyncio.create_task(_done(running))
        try:
            while not ending.done() and not reached([row["reward/mean"] for row in _steps(run)]):
                await asyncio.wait({ending}, timeout=_POLL_S)
            if not ending.done():
                running.send_signal(signal.SIGINT)
            await ending
        finally:
            ending.cancel()
    steps = _steps(run)
    shutil.rmtree(folder)
    return curve._replace(rewards=[row["reward/mean"] for row in steps], lags=[row["lag/mean"] for row in steps])


def slots_of(config: Config, lag: int) -> int:
    """Return the trajectories that are sampled while a batch is trained: the mean lag is slightly more, in batches."""
    return int(config.buffer.batch_groups * (_LAG_SHARE * lag - _BUFFERED if lag else 1)) * config.rollout.group_size


def settings_of(config: Config, lag: int, rollout: str) -> list[str]:
    """Return settings, KEY=VALUE, of a run whose rollouts wait until their tokens have a lag."""
    settings = [f"learner.steps={config.learner.steps}", f"buffer.max_lag={lag}"]
    settings += [f"rollout.slots={slots_of(config, lag)}"]
    settings += [f"learner.keep_versions={max(lag + 2, config.learner.keep_versions)}"]
    # A rollout waits for all batches before its batch, without a limit.
    limits = [f"rollout.tool_limit_s={_DEADLINE_S}", f"buffer.group_deadline_s={2 * _DEADLINE_S}"]
    return [*settings, f"task.rollout={rollout}", *limits] if lag else settings


@contextlib.asynccontextmanager
async def _process(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a Python process, and end it with the block."""
    running = await asyncio.create_subprocess_exec(
        *python(*words),
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=with_parent(),
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                running.send_signal(signal.SIGINT)
            await running.wait()


async def _done(running: asyncio.subprocess.Process) -> str:
    """Return the output of a process, once it has ended."""
    async with asyncio.timeout(_DEADLINE_S):
        output, error = await running.communicate()
    if running.returncode:
        raise BenchError(f"a run ended with {running.returncode}: {error.decode()[-2000:]}")
    return output.decode()


def _steps(run: Path) -> list[dict[str, float]]:
    try:
        lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]  # the last line may be incomplete
    except FileNotFoundError:
        return []
    return [row for row in map(named, map(json.loads, lines)) if row["event"] == "step" and row["stage"] == "rl"]
