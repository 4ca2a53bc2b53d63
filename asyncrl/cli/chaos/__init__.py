"""`asyncrl chaos`: run a cast while killing and freezing its processes, then prove that nothing was lost."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from actors.actor import RunFiles
from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.cli.audit import audit_run
from asyncrl.cli.chaos.memory import MemoryMeter
from asyncrl.cli.chaos.report import Report, draw, report_text, violations_by_sense
from asyncrl.cli.chaos.stage import ChaosError, Stage
from asyncrl.cli.chaos.strikes import Strike, Striker
from asyncrl.cli.chaos.targets import Target, drawn, each_point, parse_targets
from asyncrl.cli.chaos.witness import Witness, missing
from asyncrl.cli.options import add_settings
from asyncrl.cli.reach import opened

_BEGIN_S = 300.0  # for the run to train its first batch
_STUCK_S = 300.0  # without a trained batch after the last strike
_REACH_S = 5.0  # for the run's server to answer
_TICK_S = 0.2
_MARGIN = 0.05  # share of the steps that is left for the run to finish undisturbed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("cast", nargs="?", default="demo", help="TOML file, or a shipped cast (default: demo)")
    add_settings(parser)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to strike (default: 120)")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="between strikes (default: 2)")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="stop striking after so many; 0 for no limit")
    parser.add_argument("--seed", type=int, default=7, help="of who is struck when (default: 7)")
    parser.add_argument(
        "--targets",
        default="",
        metavar="T,...",
        help="learner, nats:kill, rollout:freeze, engine@engine.swapped, @work.said ... (default: everything)",
    )
    parser.add_argument("--points-each", type=int, default=0, metavar="N", help="visit every crash point N times")
    parser.add_argument("--cluster", action="store_true", help="on three NATS servers; `nats` is the learner's leader")
    parser.add_argument("--baseline", action="store_true", help="make the undisturbed run as well, before")
    parser.add_argument("--compare", default="", metavar="RUN", help="directory of an undisturbed run to compare with")


def run(arguments: argparse.Namespace) -> int:
    """Strike, audit, print; returns 1 where anything was lost, duplicated or wrong, or the run did not finish."""
    targets = parse_targets(arguments.targets)
    report, root = asyncio.run(_chaos(arguments, targets))
    (root / "chaos.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    draw(root / "chaos.png", report)
    print(report_text(report))
    print(f"\nthe run: {root}   strikes: {root / 'chaos.json'}   plot: {root / 'chaos.png'}")
    return 0 if report.clean else 1


async def _chaos(arguments: Namespace, targets: list[Target]) -> tuple[Report, Path]:
    words = [arguments.cast, *(word for setting in arguments.set for word in ("--set", setting))]
    words += ["--set", "nats.servers=3", "--set", "nats.keep=run"] if arguments.cluster else []
    undisturbed = read_rewards(Path(arguments.compare)) if arguments.compare else None
    if arguments.baseline:
        undisturbed = read_rewards(await _calm_run(words))
    with tempfile.TemporaryDirectory(prefix="asyncrl-chaos-") as folder:
        stage = Stage(Path(folder))
        running = await stage.start(words)
        print(f"run {stage.root.name} in {stage.root}", flush=True)
        meter = MemoryMeter(stage.crash_folder)
        metering = asyncio.create_task(meter.run())
        try:
            async with _watched(stage, running) as witness:
                striker = _striker(arguments, targets, stage, witness)
                await _strike(arguments, striker, witness, running)
                code = await _end(witness, running)
                await striker.close()
        finally:
            metering.cancel()
            await stage.stop()
    report = await _judge(arguments.seed, stage, code, witness, striker, undisturbed)
    report.memory = meter.growth()
    return report, stage.root


async def _calm_run(words: list[str]) -> Path:
    """The same run without a strike; returns its directory."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-calm-") as folder:
        stage = Stage(Path(folder))
        running = await stage.start(words)
        print(f"undisturbed run {stage.root.name} in {stage.root}", flush=True)
        try:
            if await running:
                raise ChaosError(f"the undisturbed run failed:\n{stage.words}")
        finally:
            await stage.stop()
    return stage.root


@asynccontextmanager
async def _watched(stage: Stage, running: asyncio.Task[int]) -> AsyncIterator[Witness]:
    """A witness of a run that trains.

    Raises:
        ChaosError: it ends before it has trained a batch, or does not come that far in time.
    """
    try:
        async with asyncio.timeout(_BEGIN_S):
            witness = await _witness(stage, running)
            while witness.step is None and not running.done():
                await asyncio.wait({running}, timeout=_TICK_S)
    except TimeoutError:
        raise ChaosError(f"the run has not trained a batch within {_BEGIN_S:.0f} s:\n{stage.words}") from None
    if running.done():
        raise ChaosError(f"the run ended before its first batch:\n{stage.words}")
    try:
        yield witness
    finally:
        await witness.close()
        await witness.bus.close()


async def _witness(stage: Stage, running: asyncio.Task[int]) -> Witness:
    """Who reads the run's topics, as soon as there are any."""
    address = RunFiles(stage.root).address
    while not running.done():
        if address.exists():
            with contextlib.suppress(BusError):
                bus = await Bus.connect(BusAddress.read(address), stage.root.name, name="chaos", deadline_s=_REACH_S)
                witness = Witness(bus)
                try:
                    await witness.start()
                    return witness
                except BusError:  # the streams are being made
                    await witness.close()
                    await bus.close()
        await asyncio.wait({running}, timeout=_TICK_S)
    raise ChaosError(f"the run ended before it began:\n{stage.words}")


def _striker(arguments: Namespace, targets: list[Target], stage: Stage, witness: Witness) -> Striker:
    seed, times = arguments.seed, arguments.points_each
    return Striker(
        each_point(targets, times, seed) if times else drawn(targets, seed),
        stage,
        witness,
        insist=times > 0,
        dice=random.Random(f"{seed} whom"),
        tell=lambda strike: print(strike_text(strike), flush=True),
    )


async def _strike(arguments: Namespace, striker: Striker, witness: Witness, running: asyncio.Task[int]) -> None:
    """Strike in steady time until it has been enough, or the run is about to end."""
    steps = witness.steps
    last = steps - max(2, int(_MARGIN * steps))
    until = time.monotonic() + arguments.seconds
    while not running.done() and time.monotonic() < until and (witness.step or 0) < last:
        if arguments.kills and len(striker.strikes) >= arguments.kills:
            break
        if not await striker.strike_next():
            break
        await asyncio.wait({running}, timeout=arguments.every)
    await striker.settle()


async def _end(witness: Witness, running: asyncio.Task[int]) -> int | None:
    """The run's exit code once it has ended; None when it has trained nothing for minutes though nobody strikes it."""
    step, since = witness.step, time.monotonic()
    while not running.done() and time.monotonic() < since + _STUCK_S:
        await asyncio.wait({running}, timeout=_TICK_S)
        if witness.step != step:
            step, since = witness.step, time.monotonic()
    return await running if running.done() else None


async def _judge(
    seed: int, stage: Stage, code: int | None, witness: Witness, striker: Striker, undisturbed: dict[int, float] | None
) -> Report:
    """Audit the run that is over, and compare what is there with what the witness saw."""
    async with opened(stage.root, "chaos") as bus:
        findings = (await audit_run(bus, deep=True, base=RunFiles(stage.root).base)).findings
        whole = Witness(bus)
        await whole.read()
    lost, duplicated, wrong = violations_by_sense(findings)
    cast = RunFiles(stage.root).read_cast()
    return Report(
        run=stage.root.name,
        seed=seed,
        code=code,
        finished=whole.finished,
        strikes=striker.strikes,
        unreached=dict(striker.unreached),
        resumed=stage.resumed,
        prompts=findings.prompts,
        trajectories=findings.issued,
        trained=findings.trained,
        tokens=witness.samples.tokens,
        tokens_again=witness.samples.again(cast.rollout.progress_limit),
        lost=[*lost, *missing(witness.stored, whole.stored, payload=cast.nats.keep == "run")],
        duplicated=duplicated,
        violations=wrong,
        steps=cast.learner.steps,
        rewards=whole.rewards,
        undisturbed=undisturbed,
    )


def read_rewards(root: Path) -> dict[int, float]:
    """Mean reward of each RL step of a run, from its `metrics.jsonl`.

    Raises:
        ChaosError: there is none.
    """
    try:
        rows = [msgspec.json.decode(line) for line in (root / "metrics.jsonl").read_bytes().splitlines()]
    except (OSError, msgspec.MsgspecError) as error:
        raise ChaosError(f"--compare {root}: not the directory of a run that ended: {error}") from error
    return {row["step"]: row["reward_mean"] for row in rows if row["event"] == "step" and row["stage"] == "rl"}


def strike_text(strike: Strike) -> str:
    """One strike, one line."""
    where = "" if strike.step is None else f"  step {strike.step}"
    return f"{strike.at_s:>8.1f} s{where}  {strike.kind} {', '.join(strike.names) or strike.role}"
