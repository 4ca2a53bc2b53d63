"""`asyncrl audit`: prove from a run's topics that nothing was lost and nothing was trained twice."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import Record, read_message
from asyncrl.bus.merged import Part, read_merged
from asyncrl.bus.provision import stream_states
from asyncrl.bus.publish import BlobMissing, body_of, unpack
from asyncrl.cli.data_order import DataOrder
from asyncrl.cli.find import find_directory, is_remote
from asyncrl.cli.options import add_run
from asyncrl.cli.reach import reached
from asyncrl.run.directory import RunFiles
from asyncrl.state.audit.audit import Findings, audit
from asyncrl.state.audit.ledger import Ledger
from asyncrl.state.audit.open_work import Queue
from topics.actors import REISSUE_REQUESTED, RUN_OPENED, SKIP_REQUESTED, KeeperSnapshot
from topics.engines import ENGINE_READY
from topics.table import QUEUES, TOPICS
from topics.topic import ACTORS, BATCHES, DEAD, ENGINES, FLEET, GRADES, PROMPTS, STREAMS, TRAINING, TRAJECTORIES, Topic
from topics.trajectories import TRAJECTORY_GENERATED
from topics.weights import WEIGHTS_PUBLISHED
from topics.wire import WireError

_SHOWN = 20  # violations printed; all are counted
_REPORT_S = 2.0  # seconds between progress reports
# Effects before their causes: while their ends are looked up the run goes on.
_ORDER = (ENGINES, TRAINING, BATCHES, GRADES, TRAJECTORIES, PROMPTS, ACTORS, FLEET, DEAD)


class Audited(NamedTuple):
    """An audit of a run."""

    run: str
    findings: Findings
    queues: dict[str, Queue]
    notes: list[str]  # parts that could not be compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_run(parser)
    parser.add_argument(
        "--deep",
        action="store_true",
        help="read every stored result and every row, and compare them with their digests and the data",
    )


def run(arguments: argparse.Namespace) -> int:
    """Read, compare, print what was found; returns 1 where anything is wrong."""
    import uvloop

    audited = uvloop.run(_audit(arguments))
    print(findings_text(audited))
    return 1 if audited.findings.violations else 0


async def audit_run(
    bus: Bus, *, deep: bool = False, base: Path | None = None, report: Callable[[str], None] | None = None
) -> Audited:
    """Audit a run from its topics.

    Args:
        deep: whether to read the bodies of issues and stored results.
        base: folder that the paths of the run's settings are relative to; None leaves rows uncompared with the data.
        report: is called from time to time with the progress.
    """
    newest, infos = {}, {}
    for name, queue in QUEUES.items():
        newest[name] = int((await stream_states(bus, [queue.stream]))[queue.stream.name]["last_seq"])
        infos[name] = await bus.api(f"CONSUMER.INFO.{queue.stream.full_name(bus.run)}.{name}")
    states: dict[str, dict[str, Any]] = {}
    for stream in _ORDER:
        states |= await stream_states(bus, [stream])
    ends = {stream: int(states[stream.name]["last_seq"]) for stream in _ORDER}
    results = states[TRAJECTORIES.name]
    ledger = Ledger(first_result=int(results["first_seq"]), last_result=ends[TRAJECTORIES])
    notes: list[str] = []
    take = _reporting(ledger.apply, sum(int(state["messages"]) for state in states.values()), report)
    run = bus.run
    unread = [topic.subject(run) for topic in TOPICS if topic.message is KeeperSnapshot]  # a snapshot proves nothing
    requests = [topic.pattern(run) for topic in (RUN_OPENED, REISSUE_REQUESTED, SKIP_REQUESTED)]
    first = [Part(ACTORS, ends[ACTORS], requests), Part(FLEET, ends[FLEET], unread=unread), Part(DEAD, ends[DEAD])]
    await read_merged(bus, first, take, ledger.refuse)
    await read_merged(bus, [Part(TRAINING, ends[TRAINING], unread=unread)], take, ledger.refuse)
    await read_merged(bus, [Part(ENGINES, ends[ENGINES], [ENGINE_READY.pattern(run)])], take, ledger.refuse)
    if ledger.opening.fault:
        notes.append(f"batches, ends and rows with the settings: {ledger.opening.fault}")
    order = DataOrder(ledger, ledger.opening.config) if deep and base is not None and ledger.opening.config else None
    parts = [
        Part(PROMPTS, ends[PROMPTS], headers_only=not deep, unread=unread),
        Part(TRAJECTORIES, ends[TRAJECTORIES], [TRAJECTORY_GENERATED.pattern(run)], headers_only=not deep),
        Part(GRADES, ends[GRADES]),
        Part(BATCHES, ends[BATCHES], unread=unread),
    ]
    await read_merged(bus, parts, take, ledger.refuse)
    await _read_later_versions(bus, ledger, ends[TRAINING])
    await _try_letters(bus, ledger)
    if order is not None and base is not None:
        notes += await order.compare(base)
    lease_s = ledger.opening.config.workers.lease_s if ledger.opening.config is not None else None
    queues = {name: _queue(info, newest[name], lease_s) for name, info in infos.items()}
    return Audited(bus.run, audit(ledger, queues), queues, notes)


def findings_text(audited: Audited) -> str:
    """Return the result of an audit as text."""
    wrong = audited.findings.violations
    lines = [f"run {audited.run}: {f'{len(wrong):,} violations' if wrong else 'clean'}"]
    lines += [f"{name:>14}  {text}" for name, text in _table(audited.findings, audited.queues)]
    lines += [f"{'not compared':>14}  {note}" for note in audited.notes]
    if wrong:
        kinds = Counter(violation.kind for violation in wrong)
        lines += ["", *(f"{count:>14,}  {kind}" for kind, count in kinds.most_common()), ""]
        lines += [f"{bad.kind}: {bad.id}: found {bad.found}; expected {bad.expected}" for bad in wrong[:_SHOWN]]
        if len(wrong) > _SHOWN:
            lines.append(f"... and {len(wrong) - _SHOWN:,} more")
    return "\n".join(lines)


async def _audit(arguments: argparse.Namespace) -> Audited:
    base = Path() if is_remote(arguments) else RunFiles(find_directory(arguments, live=False)).base
    async with reached(arguments, "audit") as bus:
        return await audit_run(
            bus, deep=arguments.deep, base=base, report=lambda line: print(line, file=sys.stderr, flush=True)
        )


def _reporting(
    take: Callable[[Topic[Any], Any, Record], None], messages: int, report: Callable[[str], None] | None
) -> Callable[[Topic[Any], Any, Record], None]:
    """Wrap `take` so that it reports how many of the messages it was given."""
    if report is None:
        return take
    count, reported_at = 0, time.monotonic()

    def counted(topic: Topic[Any], message: Any, record: Record) -> None:
        nonlocal count, reported_at
        count += 1
        if not count % 1024 and (now := time.monotonic()) - reported_at >= _REPORT_S:
            reported_at = now
            report(f"read {count:,} of {messages:,} messages at most")
        take(topic, message, record)

    return counted


async def _read_later_versions(bus: Bus, ledger: Ledger, after: int) -> None:
    """Tokens may come from versions that were published after the end of the learner's log was looked up."""
    end = int((await stream_states(bus, [TRAINING]))[TRAINING.name]["last_seq"])
    part = Part(TRAINING, end, [WEIGHTS_PUBLISHED.pattern(bus.run)], after=after)
    await read_merged(
        bus, [part], lambda _topic, message, _record: ledger.later_versions.add(message.version), lambda *_: None
    )


async def _try_letters(bus: Bus, ledger: Ledger) -> None:
    """Return whether the messages that dead letters excuse can be read after all."""
    streams = {stream.name: stream for stream in STREAMS}
    for name, sequence in ledger.excused():
        record = await read_message(bus, streams[name], sequence)
        try:
            if record is not None:
                unpack(record, await body_of(bus, record))
                ledger.legible.add((name, sequence))
        except (WireError, BlobMissing):
            continue  # as its letter has it


def _queue(info: dict[str, Any], newest: int, lease_s: float | None) -> Queue:
    """A work queue as the server describes it."""
    config = info["config"]
    wanted: dict[str, Any] = {"deliver_policy": "all", "ack_policy": "explicit", "max_deliver": -1}
    if lease_s is not None:
        wanted["ack_wait"] = int(lease_s * 1e9)
    differs = {name: config.get(name) for name, value in wanted.items() if config.get(name) != value}
    return Queue(
        acknowledged=int(info["ack_floor"]["stream_seq"]),
        delivered=int(info["delivered"]["stream_seq"]),
        newest=newest,
        unacknowledged=int(info["num_ack_pending"]),
        waiting=int(info["num_pending"]),
        fault=", ".join(f"{name} = {value!r}" for name, value in differs.items()),
    )


def _table(findings: Findings, queues: dict[str, Queue]) -> list[tuple[str, str]]:
    def each(counts: dict[str, int]) -> str:
        return "".join(f"   {name}: {count:,}" for name, count in counts.items())

    def held(role: str) -> str:
        if role not in queues:
            return ""
        return f" ({queues[role].waiting:,} wait in its queue, {queues[role].unacknowledged:,} are handed out)"

    open_now = [f"{role} {count:,}{held(role)}" for role, count in findings.open.items()]
    return [
        ("issued", f"{findings.issued:,}"),
        ("trained", f"{findings.trained:,}"),
        ("packed", f"{findings.packed:,} in batches not trained yet"),
        ("evaluated", f"{findings.evaluated:,} held-out prompts"),
        ("dropped", f"{sum(findings.dropped.values()):,}{each(findings.dropped)}"),
        ("open", f"{sum(findings.open.values()):,}   {', '.join(open_now)}".rstrip()),
        (
            "batches",
            f"{findings.batches:,} packed, {findings.trained_batches:,} trained, newest lineage {findings.lineage}",
        ),
        ("tokens by lag", each({str(lag): tokens for lag, tokens in findings.tokens_by_lag.items()}).strip() or "none"),
        ("versions", f"{findings.versions:,} published"),
        ("results", f"{findings.payloads:,} still stored"),
        ("unreadable", f"{findings.unreadable:,} messages"),
    ]
