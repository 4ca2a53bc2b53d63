"""The data of a report: records of the run's topics, read once."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusRefused
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import Record, last_sequence, read_message, stream_info
from asyncrl.bus.merged_reader import Part, read_merged
from asyncrl.bus.provision import NO_STREAM
from asyncrl.bus.publish import body_of
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.files import write_private
from asyncrl.page.html import report_html
from asyncrl.page.pieces import pieces_of
from topics.actors import ACTOR_STARTED, ACTOR_STOPPED, VITALS_TAKEN
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.engines import ENGINE_READY, ENGINE_UPDATING
from topics.evals import EVAL_SCORED
from topics.runs import RUN_HISTORY, RunStatus
from topics.topic import TRAJECTORIES, Stream, Topic
from topics.trajectories import TRAJECTORY_GENERATED, TRAJECTORY_GRADED, TrajectoryGenerated, TrajectoryGraded
from topics.turns import FEEDBACK_GIVEN, TURN_FINISHED, TURN_JUDGED, TURN_STARTED
from topics.weights import CHECKPOINT_SAVED, WEIGHTS_PUBLISHED
from topics.wire import SEALED, decode

_STEPS = 10_000  # of a longer run every second step is left out, or more
_EVENTS = 4_000  # newest messages of each other topic
_TOKENS = 64  # trajectories with their tokens: the newest, half of them of evaluations
_BATCHES = 50


class _Wanted(NamedTuple):
    topic: Topic[Any]
    newest: int = 0  # at most this many; 0 for all
    headers_only: bool = False


_WANTED = (
    *(_Wanted(topic) for topic in (RUN_HISTORY, BATCH_TRAINED, VITALS_TAKEN)),
    *(_Wanted(topic, _EVENTS) for topic in (WEIGHTS_PUBLISHED, CHECKPOINT_SAVED, EVAL_SCORED, TRAJECTORY_GRADED)),
    *(_Wanted(topic, _EVENTS) for topic in (ENGINE_UPDATING, ENGINE_READY, ACTOR_STARTED, ACTOR_STOPPED)),
    _Wanted(BATCH_PACKED, _BATCHES),
    *(_Wanted(topic, _EVENTS, True) for topic in (TURN_STARTED, TURN_FINISHED, TURN_JUDGED, FEEDBACK_GIVEN)),
)


class Entry(NamedTuple):
    """A message as the page takes it."""

    topic: str
    key: str
    time_ms: float
    body: bytes  # as it is stored: JSON or MessagePack
    headers: dict[str, str]


class Report(msgspec.Struct):
    """All data of a report."""

    run: str
    at_s: float  # Unix time
    records: list[Entry]  # in the order in which the page takes them
    pieces: dict[int, str]  # texts of the tokens that the records name


async def write_report(path: Path, bus: Bus, status: RunStatus, model: Path | None, metrics: Path | None) -> None:
    """Write the report of a run, readable by its owner alone, for it has texts of tasks.

    Args:
        status: the newest state.
        model: directory with the tokenizer; None on another machine, where the report has ids of tokens.
        metrics: `metrics.jsonl`; None on another machine, where the report has no figures of batches.

    Raises:
        BusError: the topics cannot be read.
        OSError: the file cannot be written.
    """
    report = await read_report(bus, status, model, metrics)
    write_private(path, report_html(msgspec.msgpack.encode(report)))


async def read_report(bus: Bus, status: RunStatus, model: Path | None, metrics: Path | None) -> Report:
    """Read the data of a report; arguments and errors as of `write_report`."""
    entries: list[Entry] = []
    for wanted in _WANTED:
        entries += await _newest(bus, wanted)
    entries.sort(key=lambda entry: entry.time_ms)
    every = max(1, sum(entry.topic == BATCH_TRAINED.name for entry in entries) // _STEPS)
    entries = _thinned(entries, every)
    state = Entry("run.state", "", status.at_s * 1e3, msgspec.json.encode(status), {})
    entries += [state, *(Entry("metrics.row", "", 0.0, line, {}) for line in _rows(metrics, every))]
    generated = await _generated(bus, entries)
    return Report(bus.run, status.at_s, entries + generated, _pieces(model, generated))


async def _newest(bus: Bus, wanted: _Wanted) -> list[Entry]:
    topic = wanted.topic
    found = deque[Entry](maxlen=wanted.newest or None)

    def take(_topic: Topic[Any], _message: object, record: Record) -> None:
        found.append(_entry(topic, record, b"" if wanted.headers_only else record.data))

    if not await _is_there(bus, topic.stream):
        return []
    part = Part(topic.stream, subjects=[topic.pattern(bus.run)], headers_only=wanted.headers_only)
    if topic is TRAJECTORY_GRADED or topic is BATCH_PACKED:  # large logs: of others in them there are few
        part = part._replace(after=max(0, await last_sequence(bus, topic.stream) - 4 * wanted.newest))
    await read_merged(bus, [part], take, lambda *_: None)
    return list(found)


async def _is_there(bus: Bus, stream: Stream) -> bool:
    """Return whether the server has a stream: those in memory end with their server, older runs lack some."""
    try:
        await stream_info(bus, stream)
    except BusRefused as error:
        if error.code != NO_STREAM:
            raise
        return False
    return True


def _entry(topic: Topic[Any], record: Record, body: bytes) -> Entry:
    headers = {name: value for name, value in record.headers.items() if not name.startswith("Nats-")}
    return Entry(topic.name, record.key, record.time_ns / 1e6, body, headers)


def _thinned(entries: Sequence[Entry], every: int) -> list[Entry]:
    """Leave out steps that are no multiple of a number, all but the newest."""
    if every == 1:
        return list(entries)
    steps = [entry for entry in entries if entry.topic == BATCH_TRAINED.name]
    left_out = {
        id(entry) for number, entry in enumerate(steps[:-1]) if decode(BATCH_TRAINED.message, entry.body).step % every
    }
    return [entry for entry in entries if id(entry) not in left_out]


def _rows(metrics: Path | None, every: int) -> Iterable[bytes]:
    """The rows of steps in `metrics.jsonl`, as they are written there."""
    if metrics is None or not metrics.exists():
        return
    with metrics.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:  # the last one may be incomplete
                continue
            if row.get("event") == "step" and row.get("step", 0) % every == 0:
                yield line


async def _generated(bus: Bus, entries: Sequence[Entry]) -> list[Entry]:
    """The newest graded trajectories with their tokens, of those that were not trimmed; live traffic is left out."""
    graded = [decode(TrajectoryGraded, one.body) for one in entries if one.topic == TRAJECTORY_GRADED.name]
    of_stage = ([one for one in graded if (one.stage == "eval") == is_eval] for is_eval in (False, True))
    found: list[Entry] = []
    for grade in chain.from_iterable(grades[-_TOKENS // 2 :] for grades in of_stage):
        record = await read_message(bus, TRAJECTORIES, grade.payload.sequence)
        if record is None or SEALED in record.headers:
            continue
        try:
            found.append(_entry(TRAJECTORY_GENERATED, record, await body_of(bus, record)))
        except (BlobMissing, SecretGone):
            continue
    return found


def _pieces(model: Path | None, generated: Sequence[Entry]) -> dict[int, str]:
    """The texts of all tokens of some trajectories."""
    if model is None:
        return {}
    try:
        tokenizer = TaskTokenizer.load(model)
    except TokenizerError:
        return {}
    segments = [segment for one in generated for segment in decode(TrajectoryGenerated, one.body).segments]
    return pieces_of(tokenizer, {token for segment in segments for token in segment.tokens.tolist()})
