"""Reading the logs of a run for its audit: in an order in which what caused a message is read before it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from asyncrl.algorithms.filters import FILTERS
from asyncrl.algorithms.named import AlgorithmError
from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import Record, last_sequence, read_message
from asyncrl.bus.merged_reader import Part, read_merged
from asyncrl.bus.provision import queue_info, stream_states
from asyncrl.bus.publish import read
from asyncrl.config.settings import Config
from asyncrl.config.staged import all_filters
from asyncrl.state.audit.audit import Findings, Queue, audit
from asyncrl.state.audit.ledger import Ledger
from asyncrl.training.objective import algorithms_of
from topics.actors import REISSUE_REQUESTED, RUN_OPENED, SKIP_REQUESTED, KeeperSnapshot
from topics.engines import ENGINE_READY
from topics.promotions import PROMOTION_REQUESTED
from topics.secrets import PURGE_REQUESTED
from topics.stages import STAGE_REQUESTED
from topics.streams import STREAM_TRIMMING, StreamTrimming
from topics.topic import (
    ACTORS,
    BATCHES,
    DEAD,
    ENGINES,
    FLEET,
    GRADES,
    PROMPTS,
    SESSIONS,
    TRAINING,
    TRAJECTORIES,
    TURNS,
    Stream,
    Topic,
)
from topics.trajectories import TRAJECTORY_GENERATED
from topics.turns import FEEDBACK_GIVEN, TURN_FINISHED, TURN_JUDGED, TURN_SHADOWED, TURN_STARTED
from topics.weights import WEIGHTS_PUBLISHED
from topics.wire import Message, WireError

_SEALED = "{:,} sealed messages of live traffic: their data keys were not purged; they are lost, or not for this login"
_REPORT_S = 2.0  # seconds between progress reports
# Effects before their causes: the run continues while their ends are looked up.
_ORDER = (ENGINES, TRAINING, BATCHES, GRADES, TRAJECTORIES, PROMPTS, SESSIONS, TURNS, FLEET, ACTORS, DEAD)
_TURNS, _GRADES = (TURN_STARTED, TURN_FINISHED, TURN_SHADOWED), (TURN_JUDGED, FEEDBACK_GIVEN)


class Audited(NamedTuple):
    """An audit of a run."""

    run: str
    findings: Findings
    queues: dict[str, Queue]
    notes: list[str]  # parts that could not be compared


class RowCheck(Protocol):
    """Notes the rows of issued prompts, and compares them with the run's data."""

    async def compare(self) -> list[str]:
        """Compare all that was noted; returns why it cannot."""


async def audit_run(
    bus: Bus,
    *,
    deep: bool = False,
    check_rows: Callable[[Ledger, Config], RowCheck] | None = None,
    own_code: bool = True,
    report: Callable[[str], None] | None = None,
) -> Audited:
    """Audit a run from its topics.

    Args:
        deep: whether to read the bodies of issues and stored results.
        check_rows: makes what compares rows with the data; None leaves them uncompared. It needs `deep`.
        own_code: whether to import the filters that the run's user wrote.
        report: is called from time to time with the progress.
    """
    before = await last_sequence(bus, FLEET)
    newest, infos = {}, {}
    for name, queue in bus.tables.queues.items():
        newest[name], infos[name] = await last_sequence(bus, queue.stream), await queue_info(bus, queue)
    states: dict[str, dict[str, Any]] = {}
    for stream in _ORDER:
        states |= await stream_states(bus, [stream])
    ends = {stream: int(states[stream.name]["last_seq"]) for stream in _ORDER}
    results = states[TRAJECTORIES.name]
    ledger = Ledger(first_result=int(results["first_seq"]))
    notes: list[str] = []
    take = _reporting(ledger.apply, sum(int(state["messages"]) for state in states.values()), report)
    run = bus.run
    unread = [one.subject(run) for one in bus.tables.topics if one.message is KeeperSnapshot]  # they prove nothing
    requests = (RUN_OPENED, PURGE_REQUESTED, REISSUE_REQUESTED, SKIP_REQUESTED, STAGE_REQUESTED, PROMOTION_REQUESTED)
    asked = Part(ACTORS, ends[ACTORS], [topic.pattern(run) for topic in requests])
    first = [asked, Part(FLEET, ends[FLEET], unread=unread), Part(DEAD, ends[DEAD])]
    await read_merged(bus, first, take, ledger.refuse)
    await read_merged(bus, [Part(TRAINING, ends[TRAINING], unread=unread)], take, ledger.refuse)
    await read_merged(bus, [Part(ENGINES, ends[ENGINES], [ENGINE_READY.pattern(run)])], take, ledger.refuse)
    for topics, headers_only in ((_TURNS, not deep), (_GRADES, True)):
        subjects = [topic.pattern(run) for topic in topics]
        await read_merged(bus, [Part(TURNS, ends[TURNS], subjects, headers_only)], take, ledger.refuse)
    await read_merged(bus, [Part(SESSIONS, ends[SESSIONS], unread=unread)], take, ledger.refuse)
    config = ledger.opening.config
    if ledger.opening.fault:
        notes.append(f"batches, ends and rows with the settings: {ledger.opening.fault}")
    notes += _own_code(config, own_code) if config is not None else []
    rows = check_rows(ledger, config) if check_rows is not None and config is not None else None
    parts = [
        Part(PROMPTS, ends[PROMPTS], headers_only=not deep, unread=unread),
        Part(TRAJECTORIES, ends[TRAJECTORIES], [TRAJECTORY_GENERATED.pattern(run)], not deep, beside=deep),
        Part(GRADES, ends[GRADES]),
        Part(BATCHES, ends[BATCHES], unread=unread),
    ]
    await read_merged(bus, parts, take, ledger.refuse)
    await _read_later(bus, ledger, {TRAINING: ends[TRAINING], FLEET: before})
    await _try_letters(bus, ledger)
    notes += [_SEALED.format(ledger.sealed)] if ledger.sealed else []
    if rows is not None:
        notes += await rows.compare()
    lease_s = config.workers.lease_s if config is not None else None
    queues = {name: _queue(info, newest[name], lease_s) for name, info in infos.items()}
    return Audited(bus.run, audit(ledger, queues), queues, notes)


def _own_code(config: Config, own_code: bool) -> list[str]:
    """Load the user's own algorithms; returns the comparisons that are impossible without them."""
    used = {(name, "objectives of batches"): table for table, name in algorithms_of(config)}
    used |= {(name, f"groups that {name} dropped"): FILTERS for name in all_filters(config)}
    notes = []
    for (name, what), table in used.items():
        try:
            if ":" in name and own_code:
                table[name]
            elif ":" in name:
                notes.append(f"{what}: {name} is code that a run of another user names, and not imported here")
        except AlgorithmError as error:
            notes.append(f"{what}: {error}")
    return notes


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


async def _read_later(bus: Bus, ledger: Ledger, after: dict[Stream, int]) -> None:
    """Read later messages of a live run about messages that were already read: tokens may come from versions that were
    published after the end of the learner's log was looked up, and results may have been trimmed since.

    Args:
        after: the sequence of each log after which to read.
    """
    wanted = ((TRAINING, WEIGHTS_PUBLISHED), (FLEET, STREAM_TRIMMING))
    parts = [
        Part(stream, await last_sequence(bus, stream), [topic.pattern(bus.run)], after=after[stream])
        for stream, topic in wanted
    ]

    def take(_topic: Topic[Any], message: Any, _record: Record) -> None:
        if isinstance(message, StreamTrimming):
            ledger.trimmed = max(ledger.trimmed, message.below)
            ledger.ended |= message.ended
        else:
            ledger.later_versions.add(message.version)

    await read_merged(bus, parts, take, lambda *_: None)


async def _try_letters(bus: Bus, ledger: Ledger) -> None:
    """Return whether the messages that dead letters excuse can be read after all."""
    streams = {stream.name: stream for stream in bus.tables.streams}
    for name, sequence in ledger.excused():
        record = await read_message(bus, streams[name], sequence)
        try:
            if record is not None:
                await read(bus, Message, record)
                ledger.legible.add((name, sequence))
        except (WireError, BlobMissing, SecretGone):
            continue  # as its letter has it


def _queue(info: dict[str, Any], newest: int, lease_s: float | None) -> Queue:
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
