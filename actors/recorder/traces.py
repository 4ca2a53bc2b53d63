"""Traces of sampled trajectories that have ended, made from the logs and sent to a collector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actors.recorder.sink_task import SinkTask
from actors.runtime.actor import Context
from asyncrl.background import on_daemon_thread
from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import Record, last_sequence, read_last, read_next
from asyncrl.bus.publish import read
from asyncrl.config.tasks import largest_group
from asyncrl.errors import UNREADABLE
from asyncrl.files import write_json
from asyncrl.sinks.sink import SinkError, SinkSettings, Span, TraceSink
from asyncrl.state.trace import seconds_by_activity, worker_slices
from asyncrl.tracing import GRADE, SAMPLE, is_sampled, span_id, trace_id
from topics.batches import BATCH_PACKED, BatchMember, BatchPacked
from topics.evals import EVAL_SCORED, EvalScored
from topics.groups import GROUP_DROPPED, GroupDropped
from topics.ids import trajectory_name
from topics.prompts import PROMPT_ISSUED
from topics.topic import BATCHES, Topic
from topics.trajectories import (
    TRAJECTORY_DROPPED,
    TRAJECTORY_GENERATED,
    TRAJECTORY_GRADED,
    TrajectoryDropped,
    TrajectoryGeneratedHeaders,
)
from topics.wire import WireError

_ENDS: tuple[Topic[Any], ...] = (BATCH_PACKED, EVAL_SCORED, TRAJECTORY_DROPPED, GROUP_DROPPED)
_ROOT, _WAIT = "trajectory", "wait for batch"
_SPANS = 512  # of one request


class End(NamedTuple):
    """The end of a trajectory."""

    trajectory_id: str
    attributes: dict[str, str | int | float]
    error: str = ""


class Spans:
    """Makes the spans of trajectories from the logs."""

    def __init__(self, bus: Bus, share: float, most: int) -> None:
        self._bus, self._share = bus, share
        self._most = most  # members of the largest group
        self.left_out = 0  # sampled trajectories whose messages are gone

    async def of_message(self, message: Any, record: Record) -> list[Span]:
        """Return the spans of all sampled trajectories that a message ends."""
        return [span for end in self._ends(message) for span in await self._of_end(end, record.time_ns)]

    def _ends(self, message: Any) -> Iterator[End]:
        """Ends of sampled trajectories."""
        for end in self._all_ends(message):
            if is_sampled(trace_id(self._bus.run, end.trajectory_id), self._share):
                yield end

    def _all_ends(self, message: Any) -> Iterable[End]:
        match message:
            case BatchPacked():
                members = [member for group in message.groups for member in group.members]
                return [_end_of(member, {"asyncrl.step": message.step}) for member in members]
            case EvalScored():
                return [_end_of(member, {"asyncrl.version": message.version}) for member in message.members]
            case TrajectoryDropped():
                return (
                    []
                    if message.again
                    else [End(message.trajectory_id, {"asyncrl.tokens": message.tokens}, message.reason)]
                )
            case GroupDropped():
                names = [trajectory_name(message.prompt_id, number) for number in range(self._most)]
                return [End(name, {}, message.reason) for name in names]
        return []

    async def _of_end(self, end: End, end_ns: int) -> list[Span]:
        issued = await read_last(self._bus, PROMPT_ISSUED, end.trajectory_id)
        if issued is None:
            return []  # the group has fewer members
        generated = await read_last(self._bus, TRAJECTORY_GENERATED, end.trajectory_id)
        graded = await read_last(self._bus, TRAJECTORY_GRADED, end.trajectory_id)
        self.left_out += generated is None and not end.error
        trace = trace_id(self._bus.run, end.trajectory_id)
        root = span_id(trace, _ROOT)
        attributes = {"asyncrl.trajectory": end.trajectory_id, **end.attributes}
        spans = [Span(_ROOT, trace, root, b"", issued.time_ns, end_ns, attributes, end.error)]
        marks = [issued.time_ns, generated and generated.time_ns, graded and graded.time_ns, end_ns]
        for name, begin, until in zip((SAMPLE, GRADE, _WAIT), marks, marks[1:], strict=False):
            if begin and until and until >= begin:
                spans.append(Span(name, trace, span_id(trace, name), root, begin, until, {}))
        if generated is not None:
            worked = seconds_by_activity(TrajectoryGeneratedHeaders.read(generated.headers).spans)
            for part in worker_slices(worked, issued.time_ns, generated.time_ns):
                spans.append(Span(part.name, trace, span_id(trace, part.name), span_id(trace, SAMPLE), *part[1:], {}))
        return spans


def _end_of(member: BatchMember, attributes: dict[str, str | int | float]) -> End:
    figures: dict[str, str | int | float] = {"asyncrl.reward": float(member.reward), "asyncrl.tokens": member.tokens}
    return End(member.trajectory_id, attributes | figures)


class TracesTask(SinkTask):
    """Sends the traces of sampled trajectories, in the order of their ends, from a stored position.

    Nothing is queued: what a collector does not take is read from the logs again. Spans that were sent before a kill
    are sent again with the same ids.
    """

    def __init__(self, context: Context, name: str, settings: SinkSettings) -> None:
        super().__init__(context, name, settings)
        self._share = settings.traced_share
        self._spans = Spans(context.bus, self._share, largest_group(context.config))
        self._stored = context.files.root / "sinks" / f"{name}.json"
        self._after: dict[str, int] = {}  # sequence up to which messages of a topic were sent
        self._newest: dict[str, int] = {}  # sequence up to which there may be some

    def stored(self, topic: Topic[Any], record: Record) -> None:
        """Take note of a record of the run."""
        if self._share and topic in _ENDS:
            self._newest[topic.name] = record.sequence
            self.news.set()

    async def _write(self) -> None:
        exporter = self._settings.trace_sink(self._context.bus.run)
        end = await last_sequence(self._context.bus, BATCHES)
        self._after = {name: at for name, at in _read_position(self._stored).items() if at <= end}
        self._newest = {topic.name: end for topic in _ENDS} if self._share else {}
        while True:
            self.news.clear()
            last = self.ended.is_set()
            for topic in _ENDS:
                await self._send_new(topic, exporter)
            self._works()
            if last:
                return
            await self._gathered()

    async def _send_new(self, topic: Topic[Any], exporter: TraceSink) -> None:
        bus, name, after = self._context.bus, topic.name, self._after.get(topic.name, 0)
        while after < (newest := self._newest.get(name, 0)):
            record = await read_next(bus, BATCHES, topic.pattern(bus.run), after + 1)
            if record is None:
                after = newest
                break
            after = record.sequence
            try:
                spans = await self._spans.of_message(await read(bus, topic.message, record), record)
            except (WireError, BlobMissing):
                continue  # the log's readers keep it as a dead letter
            for first in range(0, len(spans), _SPANS):
                await on_daemon_thread(exporter.send, spans[first : first + _SPANS])
            self._context.count(f"{self._name}_spans", len(spans))
            self._context.vitals[f"{self._name}_left_out"] = self._spans.left_out
            if spans:
                self._store(name, after)
        if after != self._after.get(name, 0):
            self._store(name, after)

    def _store(self, name: str, after: int) -> None:
        self._after[name] = after
        self._stored.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._stored, self._after)


def _read_position(path: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        return {}
    except UNREADABLE as error:
        raise SinkError(f"{path} holds no position of traces: {error}; remove it to send all traces again") from error
