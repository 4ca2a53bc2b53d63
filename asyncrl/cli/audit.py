"""`asyncrl audit`: prove from a run's topics that nothing was lost and nothing was trained twice."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from typing import Any

from asyncrl.bus.connection import Bus
from asyncrl.bus.provision import QUEUES
from asyncrl.cli.options import add_run
from asyncrl.cli.reach import reached, read_log
from asyncrl.ledger.audit import Findings, Queue, audit
from asyncrl.ledger.ledger import Ledger
from topics.actors import DEAD_LETTER, RUN_OPENED
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.groups import GROUP_DROPPED
from topics.prompts import PROMPT_ISSUED
from topics.streams import STREAM_TRIMMED
from topics.topic import TRAJECTORIES, Topic
from topics.trajectories import TRAJECTORY_DROPPED, TRAJECTORY_FAILED, TRAJECTORY_GENERATED, TRAJECTORY_GRADED
from topics.weights import CHECKPOINT_SAVED, WEIGHTS_PUBLISHED

_SHOWN = 20  # violations printed; all are counted
# Effects before their causes, for while they are read the run goes on. Versions are both: an effect of batches, and
# what tokens come from.
_ORDER: tuple[tuple[Topic[Any], ...], ...] = (
    (BATCH_TRAINED, CHECKPOINT_SAVED, WEIGHTS_PUBLISHED),
    (BATCH_PACKED, TRAJECTORY_DROPPED, GROUP_DROPPED),
    (TRAJECTORY_GRADED, TRAJECTORY_FAILED),
    (TRAJECTORY_GENERATED,),
    (PROMPT_ISSUED,),
    (WEIGHTS_PUBLISHED,),
    (DEAD_LETTER,),
    (RUN_OPENED,),
    (STREAM_TRIMMED,),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_run(parser)
    parser.add_argument("--deep", action="store_true", help="read every stored result and compare it with its digest")


def run(arguments: argparse.Namespace) -> int:
    """Read, compare, say what was found; returns 1 where anything is wrong."""
    name, findings, queues = asyncio.run(_audit(arguments))
    print(findings_text(name, findings, queues))
    return 1 if findings.violations else 0


async def audit_run(bus: Bus, *, deep: bool = False) -> tuple[Findings, dict[str, Queue]]:
    """Audit a run from its topics.

    Args:
        deep: whether to read the bodies of stored results.

    Returns:
        What was found, and the work queues.
    """
    queues = {}
    for name, queue in QUEUES.items():
        log = queue.stream.full_name(bus.run)
        newest = int((await bus.api(f"STREAM.INFO.{log}"))["state"]["last_seq"])
        info = await bus.api(f"CONSUMER.INFO.{log}.{name}")
        held = info["num_pending"] + info["num_ack_pending"]
        queues[name] = Queue(int(info["ack_floor"]["stream_seq"]), newest, held)
    results = await bus.api(f"STREAM.INFO.{TRAJECTORIES.full_name(bus.run)}")
    ledger = Ledger()
    for topics in _ORDER:
        stream = topics[0].stream
        headers_only = topics == (PROMPT_ISSUED,) or (topics == (TRAJECTORY_GENERATED,) and not deep)
        subjects = [topic.pattern(bus.run) for topic in topics]
        await read_log(bus, stream, subjects, ledger, headers_only=headers_only)
    return audit(ledger, queues, first_result=int(results["state"]["first_seq"])), queues


def findings_text(run: str, findings: Findings, queues: dict[str, Queue]) -> str:
    """What an audit found, for people."""
    wrong = findings.violations
    lines = [f"run {run}: {f'{len(wrong):,} violations' if wrong else 'clean'}"]
    lines += [f"{name:>14}  {text}" for name, text in _table(findings, queues)]
    if wrong:
        kinds = Counter(violation.kind for violation in wrong)
        lines += ["", *(f"{count:>14,}  {kind}" for kind, count in kinds.most_common()), ""]
        lines += [f"{bad.kind}: {bad.id}: found {bad.found}; expected {bad.expected}" for bad in wrong[:_SHOWN]]
        if len(wrong) > _SHOWN:
            lines.append(f"... and {len(wrong) - _SHOWN:,} more")
    return "\n".join(lines)


async def _audit(arguments: argparse.Namespace) -> tuple[str, Findings, dict[str, Queue]]:
    async with reached(arguments, "audit") as bus:
        return bus.run, *await audit_run(bus, deep=arguments.deep)


def _table(findings: Findings, queues: dict[str, Queue]) -> list[tuple[str, str]]:
    def each(counts: dict[str, int]) -> str:
        return "".join(f"   {name}: {count:,}" for name, count in counts.items())

    held = [
        f"{role} {count:,}" + (f" ({queues[role].held:,} in its queue)" if role in queues else "")
        for role, count in findings.open.items()
    ]
    return [
        ("issued", f"{findings.issued:,}"),
        ("trained", f"{findings.trained:,}"),
        ("packed", f"{findings.packed:,} in batches not trained yet"),
        ("dropped", f"{sum(findings.dropped.values()):,}{each(findings.dropped)}"),
        ("open", f"{sum(findings.open.values()):,}   {', '.join(held)}".rstrip()),
        ("batches", f"{findings.batches:,} packed, {findings.trained_batches:,} trained, newest line {findings.line}"),
        ("tokens by lag", each({str(lag): tokens for lag, tokens in findings.tokens_by_lag.items()}).strip() or "none"),
        ("versions", f"{findings.versions:,} published"),
        ("results", f"{findings.payloads:,} still stored"),
        ("unreadable", f"{findings.unreadable:,} messages"),
    ]
