"""`asyncrl chaos`: kill and freeze processes of a run, then prove from its topics that nothing was lost.

`--run` takes a run that is up. A campaign brings up a config itself, also kills `up` and ends processes at crash
points; it is part of a source checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from actors.prompter.data_order import DataOrder
from asyncrl.bus.errors import BusError
from asyncrl.cli.audit import findings_text
from asyncrl.cli.bench import from_checkout, has_checkout
from asyncrl.cli.options import add_option
from asyncrl.cli.target import add_config, add_directory, live_run, tables_of
from asyncrl.errors import AsyncRLError, WrongUsage
from asyncrl.run.connect import FoundRun, RunNotFound, opened
from asyncrl.run.directory import RunFiles, is_locked
from asyncrl.run.fault_injection import (
    NODE,
    PROGRAM,
    SANDBOX,
    Part,
    Rests,
    Target,
    choose,
    drawn,
    inject,
    node_targets,
    open_node_killer,
    parse_targets,
    parts,
    resume,
    sandbox_targets,
    sandboxed,
    signal_targets,
)
from asyncrl.state.audit.reading import Audited, audit_run

_CAMPAIGN = "benchmarks.chaos.command"
_POLL_S = 0.2
_FIND_S = 60.0  # for a process of a wanted role to live
_RETURN_S = 120.0  # for a frozen server to be noticed and replaced


class Plan(NamedTuple):
    """The faults that a run gets, and their number."""

    targets: list[Target]
    seconds: float  # from the first to the last, at most
    every_s: float
    most: int
    seed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--run",
        dest="run_id",
        nargs="?",
        const="",
        metavar="RUN",
        help="use a run that is already up (default: the live one)",
    )
    add_directory(parser)
    add_option(parser, "--seconds SECONDS", 120.0, "how long to inject faults")
    add_option(parser, "--every SECONDS", 2.0, "seconds between injections")
    add_option(parser, "--kills N", 0, "stop after N injections; 0 for no limit")
    add_option(parser, "--seed SEED", 7, "seed of the order of injections")
    about = "learner, nats:kill, rollout:freeze, engine@engine.swapped, @work.published ... (default: everything)"
    add_option(parser, "--targets T,...", "", about)
    parser.set_defaults(campaign=("config",))
    if has_checkout():
        from_checkout(_CAMPAIGN, "asyncrl chaos").add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Inject faults, audit, print; returns 1 where anything was lost, duplicated, wrong or unfinished."""
    if arguments.run_id is None:
        if not has_checkout():
            raise WrongUsage(
                "asyncrl chaos CONFIG: campaigns are not installed with the package; run it from a source checkout, or "
                "take a run that is up: --run RUN"
            )
        return int(from_checkout(_CAMPAIGN, "asyncrl chaos CONFIG").run(arguments))
    parser, campaign = arguments.parser, arguments.campaign
    given = [name for name in campaign if getattr(arguments, name) != parser.get_default(name)]
    if given:
        names = ", ".join("CONFIG" if name == "config" else f"--{name.replace('_', '-')}" for name in given)
        raise WrongUsage(f"--run takes a run that is up; {names}: only for a campaign, which brings up its own")
    found = live_run(arguments)
    config = found.files.read_config()
    known = [*signal_targets(tables_of(arguments)), *node_targets(config.placement), *sandbox_targets(config)]
    targets = parse_targets(arguments.targets, known)
    plan = Plan(targets, arguments.seconds, arguments.every, arguments.kills or sys.maxsize, arguments.seed)
    return asyncio.run(_chaos(found, plan))


async def _chaos(found: FoundRun, plan: Plan) -> int:
    counts = await inject_until_end(found.files, plan, lambda line: print(line, flush=True))
    text = ", ".join(f"{target} {count}" for target, count in sorted(counts.items())) or "none"
    print(f"run {found.run}, seed {plan.seed}: {counts.total()} injections: {text}", flush=True)
    audited = await _audited(found)
    print(findings_text(audited))
    return 1 if audited.findings.violations else 0


async def inject_until_end(files: RunFiles, plan: Plan, report: Callable[[str], None]) -> Counter[Target]:
    """Inject faults into the live run of a directory, until it has been enough or the run ends.

    Args:
        report: is given a line about each.

    Returns:
        How often each fault was injected.

    Raises:
        AsyncRLError: for a minute no process lived that could be chosen.
    """
    dice, order = random.Random(f"{plan.seed} target"), drawn(plan.targets, plan.seed)
    rests = Rests(files.root)
    nodes = open_node_killer(files, dice) if any(target.role == NODE for target in plan.targets) else None
    wake_s = files.read_config().workers.lease_s + 1.0  # another worker may have its work by then
    began_s = found_s = time.monotonic()
    counts: Counter[Target] = Counter()
    waking: list[asyncio.Task[None]] = []
    while (now_s := time.monotonic()) - began_s < plan.seconds and counts.total() < plan.most and is_locked(files.root):
        target = next(order)
        if nodes and target.role == NODE and (killed := await nodes.kill()):
            found_s = now_s
            counts[target] += 1
            report(f"{now_s - began_s:>8.1f} s  kill {killed}")
            await asyncio.sleep(plan.every_s)
            continue
        inside = target.role in (SANDBOX, PROGRAM)
        living = [] if rests.has(target.role) else sandboxed(files.root) if inside else parts(files.root)
        chosen = choose(target.role, living, dice)
        if chosen:
            found_s = now_s
            inject(target.kind, chosen)
            counts[target] += 1
            report(f"{now_s - began_s:>8.1f} s  {target.kind} {', '.join(part.name for part in chosen)}")
            for part in chosen * (not inside):  # no supervisor counts the deaths of sandboxes
                rests.note(part.role)
            waking += [asyncio.create_task(_wake(part, wake_s)) for part in chosen if target.kind == "wake"]
            await asyncio.sleep(plan.every_s)
        elif now_s - found_s > _FIND_S:
            found = f"run {files.root.name}: no process of {', '.join(map(str, plan.targets))} runs"
            rule = "; the head of a Ray cluster is not killed, nor the last other node"
            raise AsyncRLError(found + rule * any(target.role == NODE for target in plan.targets))
        else:
            await asyncio.sleep(_POLL_S)  # no event announces that one is there
    await asyncio.gather(*waking)
    return counts


async def _wake(part: Part, after_s: float) -> None:
    """Continue a stopped process, even if this command is interrupted."""
    try:
        await asyncio.sleep(after_s)
    finally:
        resume(part)


async def _audited(found: FoundRun) -> Audited:
    """Audit the run, as soon as its server is there again.

    Raises:
        RunNotFound, BusError: it does not come back.
    """
    until_s = time.monotonic() + _RETURN_S
    while True:
        try:
            async with opened(found, "chaos") as bus:
                return await audit_run(bus, deep=True, check_rows=partial(DataOrder, base=found.files.base))
        except (RunNotFound, BusError):
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(_POLL_S)  # no event announces that it answers
