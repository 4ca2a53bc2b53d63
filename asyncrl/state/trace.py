"""A run as a trace in the Trace Event Format, which Perfetto opens, made from its logs."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.bus.merged_reader import read_fold
from asyncrl.run.connect import FoundRun, opened
from topics.actors import ActorStarted, ActorStopped
from topics.batches import BatchPacked, BatchTrained
from topics.engines import EngineReady, EngineUpdating
from topics.prompts import PromptIssuedHeaders
from topics.stalls import StallEnded, StallFound
from topics.trajectories import GradeHeaders, TrajectoryGeneratedHeaders
from topics.weights import CheckpointSaved, WeightsPublished

_TRAJECTORIES, _STALLS = 1, 2  # process ids of tracks that belong to no actor
_STEPS = 2  # thread id, next to the life of the process


class TraceEvent(msgspec.Struct, omit_defaults=True):
    """An event. Source: Trace Event Format, Google, 2016. Times are microseconds since the first message."""

    name: str
    ph: Literal["X", "C", "M", "i"]  # complete, counter, metadata, instant
    pid: int
    tid: int
    ts: float
    dur: float | None = None
    cat: str = ""
    s: str = ""  # scope of an instant
    args: dict[str, Any] = {}


class Trace(msgspec.Struct):
    """The content of a trace file."""

    traceEvents: list[TraceEvent]  # noqa: N815 - the name in the format
    displayTimeUnit: str  # noqa: N815 - the name in the format
    otherData: dict[str, Any]  # noqa: N815 - the name in the format


class Marks(msgspec.Struct):
    """Moments of one trajectory, nanoseconds of the server's clock; 0 for none."""

    issued: int
    generated: int = 0
    graded: int = 0
    packed: int = 0
    step: int = 0  # of its batch
    spans: dict[str, float] = {}  # seconds of the worker by activity


class TraceFold(Fold):
    """Slices of actors, steps, updates and trajectories."""

    def __init__(self, most: int) -> None:
        self.marks: dict[str, Marks] = {}  # of the newest trajectories, in the order of their issue
        self.left_out = 0
        self.first_ns = self.last_ns = 0
        self._most = most
        self._trained_ns = 0  # newest step
        self._events: list[TraceEvent] = []
        self._pids: dict[str, int] = {}
        self._open: dict[tuple[str, str], int] = {}  # begin of each open slice, by kind and object

    def trace(self, run: str) -> Trace:
        """Return the trace of a run whose logs were read."""
        for (kind, name), since_ns in list(self._open.items()):
            self._close(kind, name, since_ns, self.last_ns)
        names = {_TRAJECTORIES: "trajectories", _STALLS: "stalls", **{pid: name for name, pid in self._pids.items()}}
        named = [TraceEvent("process_name", "M", pid, 0, 0, args={"name": name}) for pid, name in names.items()]
        first_us = self.first_ns / 1e3
        events = sorted([*self._events, *self._slices_of_trajectories()], key=lambda event: event.ts)
        for event in events:
            event.ts = round(event.ts - first_us, 3)
        about = {"run": run, "began_unix_s": self.first_ns / 1e9, "trajectories_left_out": self.left_out}
        return Trace([*named, *events], "ms", about)

    def _seen(self, record: Record) -> None:
        self.first_ns = min(self.first_ns or record.time_ns, record.time_ns)
        self.last_ns = max(self.last_ns, record.time_ns)

    def _pid(self, actor_id: str) -> int:
        return self._pids.setdefault(actor_id, len(self._pids) + _STALLS + 1)

    def _slice(self, name: str, track: tuple[int, int], span_ns: tuple[int, int], **about: Any) -> None:
        begin, end = span_ns
        self.first_ns = min(self.first_ns or begin, begin)
        pid, tid = track
        self._events.append(TraceEvent(name, "X", pid, tid, begin / 1e3, max(0, end - begin) / 1e3, args=about))

    def _instant(self, name: str, record: Record) -> None:
        event = TraceEvent(name, "i", self._pid("learner-1"), _STEPS, record.time_ns / 1e3, s="t")
        self._events.append(event)

    def _close(self, kind: str, name: str, since_ns: int, at_ns: int, **about: Any) -> None:
        del self._open[kind, name]
        track = (_STALLS, 1) if kind == "stall" else (self._pid(name), 1 if kind == "life" else _STEPS)
        text = {"life": name, "stall": name}.get(kind, kind)
        self._slice(text, track, (since_ns, at_ns), **about)

    # -- actors and engines

    def _on_started(self, message: ActorStarted, record: Record) -> None:
        self._seen(record)
        if message.lost:
            return
        if since_ns := self._open.get(("life", message.actor_id)):
            self._close("life", message.actor_id, since_ns, record.time_ns, end="killed")
        self._pid(message.actor_id)
        self._open["life", message.actor_id] = record.time_ns

    def _on_stopped(self, message: ActorStopped, record: Record) -> None:
        self._seen(record)
        if since_ns := self._open.get(("life", message.actor_id)):
            self._close("life", message.actor_id, since_ns, record.time_ns, end=message.reason or "asked to stop")

    def _on_updating(self, message: EngineUpdating, record: Record) -> None:
        self._open["update of weights", message.engine_id] = record.time_ns

    def _on_ready(self, message: EngineReady, record: Record) -> None:
        kind = "update of weights"
        if since_ns := self._open.get((kind, message.engine_id)):
            self._close(kind, message.engine_id, since_ns, record.time_ns, version=message.version)

    def _on_stall_found(self, message: StallFound, record: Record) -> None:
        self._open["stall", f"{message.cause}: {message.object}"] = record.time_ns

    def _on_stall_ended(self, message: StallEnded, record: Record) -> None:
        name = f"{message.cause}: {message.object}"
        if since_ns := self._open.get(("stall", name)):
            self._close("stall", name, since_ns, record.time_ns)

    # -- training

    def _on_trained(self, message: BatchTrained, record: Record) -> None:
        self._seen(record)
        pid, end = self._pid("learner-1"), record.time_ns
        train, wait = (int(1e9 * message.metrics.get(name, 0.0)) for name in ("train_s", "wait_s"))
        about = {"step": message.step, "trajectories": message.trajectories, "tokens": sum(message.lags.values())}
        begin = max(self._trained_ns, end - train)
        self._slice(f"wait for batch {message.step}", (pid, _STEPS), (max(self._trained_ns, begin - wait), begin))
        self._slice(f"train batch {message.step}", (pid, _STEPS), (begin, end), **about)
        self._trained_ns = end
        tokens = sum(message.lags.values())
        lag = sum(lag * count for lag, count in message.lags.items()) / tokens if tokens else 0.0
        for name, value in (("reward", message.rewards[0]), ("lag, versions", lag)):
            self._events.append(TraceEvent(name, "C", pid, 0, end / 1e3, args={name: value}))

    def _on_published(self, message: WeightsPublished, record: Record) -> None:
        self._instant(f"version {message.version} published", record)

    def _on_saved(self, message: CheckpointSaved, record: Record) -> None:
        self._instant(f"checkpoint of step {message.step} saved", record)

    # -- trajectories

    def _on_issued(self, headers: PromptIssuedHeaders, record: Record) -> None:
        self._seen(record)
        self.marks.setdefault(headers.trajectory_id, Marks(record.time_ns))
        if len(self.marks) > self._most:
            del self.marks[next(iter(self.marks))]
            self.left_out += 1

    def _on_generated(self, headers: TrajectoryGeneratedHeaders, record: Record) -> None:
        if (marks := self.marks.get(headers.trajectory_id)) is not None:
            marks.generated = record.time_ns
            marks.spans = seconds_by_activity(headers.spans)

    def _on_graded(self, headers: GradeHeaders, record: Record) -> None:
        if (marks := self.marks.get(headers.trajectory_id)) is not None:
            marks.graded = record.time_ns

    def _on_packed(self, message: BatchPacked, record: Record) -> None:
        for member in [member for group in message.groups for member in group.members]:
            if (marks := self.marks.get(member.trajectory_id)) is not None:
                marks.packed, marks.step = record.time_ns, message.step

    def _slices_of_trajectories(self) -> list[TraceEvent]:
        """Return slices on as few rows as trajectories were open at once: each row holds one at a time."""
        free_at: list[int] = []  # of each row
        found = []
        for name, marks in self.marks.items():
            end = max(marks.generated, marks.graded, marks.packed) or self.last_ns
            row = next((row for row, free_ns in enumerate(free_at) if free_ns <= marks.issued), len(free_at))
            free_at[row:] = [end, *free_at[row + 1 :]]
            about = {"batch": marks.step} if marks.packed else {}
            worked = worker_slices(marks.spans, marks.issued, marks.generated)
            spans = [(name, marks.issued, end, {**about, **marks.spans}), *((*one, {}) for one in worked)]
            before = marks.generated if marks.spans else marks.issued
            for part, at in (("sample", marks.generated), ("grade", marks.graded), ("wait for batch", marks.packed)):
                if at >= before and at and not (part == "sample" and marks.spans):
                    spans.append((part, before, at, {}))
                    before = at
            for text, begin, until, words in spans:
                span_us = max(0, until - begin) / 1e3
                found.append(TraceEvent(text, "X", _TRAJECTORIES, row, begin / 1e3, span_us, "trajectory", args=words))
        return found


class Slice(NamedTuple):
    """A part of a trajectory, nanoseconds of the server's clock."""

    name: str
    begin_ns: int
    end_ns: int


def seconds_by_activity(spans: str) -> dict[str, float]:
    """Return the seconds of a worker from the header of a result, such as `generate:1.25,tool:0.5`."""
    parts = [span.split(":") for span in spans.split(",") if span]
    return {activity: float(seconds) for activity, seconds in parts}


def worker_slices(spans: dict[str, float], issued_ns: int, generated_ns: int) -> list[Slice]:
    """Return a slice of the queue, and one of each activity of the worker: its sum, as activities alternate.

    Args:
        spans: seconds of the worker by activity; empty for a result of an older version.
    """
    worked = {activity: int(seconds * 1e9) for activity, seconds in spans.items()}
    at = max(issued_ns, generated_ns - sum(worked.values()))
    slices = [Slice("queue", issued_ns, at)] if spans and at > issued_ns else []
    for activity, spent in worked.items():
        end = min(at + spent, generated_ns)
        slices.append(Slice(activity, at, end))
        at = end
    return slices


async def read_trace(found: FoundRun, most: int) -> Trace:
    """Read the trace of a run, live or over, from its logs.

    Args:
        most: trajectories that it holds; the newest are kept.

    Raises:
        RunNotFound: the run cannot be reached.
    """
    fold = TraceFold(most)
    async with opened(found, "trace") as bus:
        await read_fold(bus, fold)
    return fold.trace(found.run)
