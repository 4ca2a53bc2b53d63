"""`asyncrl chaos CONFIG`: run a config, kill and freeze its processes, then prove that no data was lost."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import msgspec

from actors.prompter.data_order import DataOrder
from asyncrl.cli.target import add_settings
from asyncrl.config.load import load_config
from asyncrl.files import write_json
from asyncrl.run.connect import FoundRun, opened
from asyncrl.run.directory import RunFiles
from asyncrl.run.fault_injection import Target, parse_targets
from asyncrl.state.audit.reading import audit_run
from asyncrl.telemetry.metric_names import named
from benchmarks.chaos.campaign import Campaign, Plan
from benchmarks.chaos.injections import Injection
from benchmarks.chaos.memory import MemoryMeter
from benchmarks.chaos.report import Report, draw, report_text, violations_by_sense
from benchmarks.chaos.stage import ChaosError, Stage
from benchmarks.chaos.stall import Stall
from benchmarks.chaos.targets import all_targets
from benchmarks.chaos.witness import Witness, missing

_PROGRESS_S = 10.0
_OWN = ("config", "set", "points_each", "cluster", "after_recovery", "stall", "baseline", "compare")  # arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that only a campaign has."""
    parser.set_defaults(campaign=_OWN)
    add_settings(parser)
    parser.add_argument("--points-each", type=int, default=0, metavar="N", help="visit every crash point N times")
    parser.add_argument("--cluster", action="store_true", help="use three NATS servers; `nats` is the learner's leader")
    parser.add_argument(
        "--after-recovery",
        action="store_true",
        help="inject first after an RL step, then once all injected roles have recovered and another step is trained",
    )
    parser.add_argument(
        "--stall",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="time without a result, grade or step after which the run counts as stalled (default: 120)",
    )
    parser.add_argument("--baseline", action="store_true", help="first make an undisturbed run for comparison")
    parser.add_argument("--compare", default="", metavar="RUN", help="directory of an undisturbed run for comparison")


def run(arguments: argparse.Namespace) -> int:
    """Inject faults, audit and print; return 1 if data was lost, duplicated or wrong, or the run did not finish."""
    config = load_config(arguments.config or "demo", overrides=arguments.set).config
    targets = parse_targets(arguments.targets, all_targets(config))
    if not arguments.stall > 0:
        raise ChaosError(f"--stall {arguments.stall:g}: expected more than 0 seconds")
    report, root = asyncio.run(_chaos(arguments, targets))
    write_json(root / "chaos.json", report)
    draw(root / "chaos.png", report)
    print(report_text(report))
    print(f"\nthe run: {root}   injections: {root / 'chaos.json'}   plot: {root / 'chaos.png'}")
    return 0 if report.clean else 1


async def _chaos(arguments: Namespace, targets: list[Target]) -> tuple[Report, Path]:
    words = [arguments.config or "demo", *(word for setting in arguments.set for word in ("--set", setting))]
    words += ["--set", "nats.servers=3", "--set", "nats.keep=run"] if arguments.cluster else []
    plan = Plan.of(arguments, targets)
    undisturbed = read_rewards(Path(arguments.compare)) if arguments.compare else None
    if arguments.baseline:
        undisturbed = read_rewards(await _calm_run(words, plan))
    with tempfile.TemporaryDirectory(prefix="asyncrl-chaos-") as folder:
        stage = Stage(Path(folder))
        running = await stage.start(words, plan.stall_s)
        print(f"run {stage.root.name} in {stage.root}", flush=True)
        meter = MemoryMeter(stage.parts)
        campaign = Campaign(plan, stage, running, lambda injection: print(injection_text(injection), flush=True))
        tasks = [asyncio.create_task(work) for work in (meter.run(), _report_progress(campaign))]
        try:
            stall = await campaign.run()
        finally:
            for task in tasks:
                task.cancel()
            await stage.stop()
    code = None if stall is not None else running.result()
    report = await _judge(arguments.seed, stage, campaign, code, stall)
    report.undisturbed, report.memory = undisturbed, meter.growth()
    return report, stage.root


async def _report_progress(campaign: Campaign) -> None:
    """Print the progress of the run every ten seconds: the faults may end long before the run."""
    began_s = time.monotonic()
    while True:
        await asyncio.sleep(_PROGRESS_S)
        print(f"{time.monotonic() - began_s:>8.1f} s  {campaign.progress()}", flush=True)


async def _calm_run(words: list[str], plan: Plan) -> Path:
    """Run the same config without a fault; returns its directory.

    Raises:
        ChaosError: the run failed or stalled.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-calm-") as folder:
        stage = Stage(Path(folder))
        running = await stage.start(words, plan.stall_s)
        print(f"undisturbed run {stage.root.name} in {stage.root}", flush=True)
        try:
            stall = await Campaign(dataclasses.replace(plan, seconds=0.0), stage, running, lambda _: None).run()
        finally:
            await stage.stop()
    if stall is not None or running.result():
        raise ChaosError(f"the undisturbed run failed: {stall.text if stall is not None else stage.words}")
    return stage.root


async def _judge(seed: int, stage: Stage, campaign: Campaign, code: int | None, stall: Stall | None) -> Report:
    """Audit the finished run, and compare its logs with the witness's record."""
    config = RunFiles(stage.root).read_config()
    report = Report(
        run=stage.root.name, seed=seed, code=code, stall=stall, resumed=stage.resumed, steps=config.learner.steps
    )
    report.output = stage.words if code else ""
    if campaign.injector is not None:
        report.injections, report.unreached = campaign.injector.injections, dict(campaign.injector.unreached)
        report.unrecovered = campaign.unrecovered
    if campaign.witness is None:
        return report  # the run never had topics
    check = partial(DataOrder, base=RunFiles(stage.root).base)
    async with opened(FoundRun(stage.root.name, stage.root), "chaos") as bus:
        findings = (await audit_run(bus, deep=True, check_rows=check)).findings
        whole = Witness(bus)
        await whole.read()
    lost, report.duplicated, report.violations = violations_by_sense(findings)
    report.lost = [*lost, *missing(campaign.witness.stored, whole.stored, payload=config.nats.keep == "run")]
    report.finished, report.rewards = whole.finished, whole.rewards
    report.prompts, report.trajectories, report.trained = findings.prompts, findings.issued, findings.trained
    samples = campaign.witness.samples
    report.tokens, report.tokens_again = samples.tokens, samples.again(config.rollout.progress_limit)
    return report


def read_rewards(root: Path) -> dict[int, float]:
    """Mean reward of each RL step of a run, from its `metrics.jsonl`.

    Raises:
        ChaosError: the run has no such file.
    """
    try:
        rows = [named(msgspec.json.decode(line)) for line in (root / "metrics.jsonl").read_bytes().splitlines()]
    except (OSError, msgspec.MsgspecError) as error:
        raise ChaosError(f"--compare {root}: not the directory of a run that ended: {error}") from error
    return {row["step"]: row["reward/mean"] for row in rows if row["event"] == "step" and row["stage"] == "rl"}


def injection_text(injection: Injection) -> str:
    """Return one injection as one line."""
    where = "" if injection.step is None else f"  step {injection.step}"
    return f"{injection.at_s:>8.1f} s{where}  {injection.kind} {', '.join(injection.names) or injection.role}"
