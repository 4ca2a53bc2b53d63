"""The recorder: writes what happened for people. It reads the logs from its own recorded positions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder.fold import RecorderFold, RecorderState, StepRow
from actors.recorder.sinks import Sinks
from actors.runtime.actor import Context
from actors.runtime.snapshots import check_positions, format_of
from asyncrl.background import first_of
from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.fold import Input
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record, last_sequence, read_last_of_each, read_next, stream_info
from asyncrl.bus.merged_reader import Part, read_merged
from asyncrl.bus.publish import read
from asyncrl.errors import UNREADABLE, AsyncRLError, DamagedFile
from asyncrl.files import write_json
from asyncrl.sinks.file.sink import FileSink
from asyncrl.sinks.sink import Position
from asyncrl.state.health_checks import UNWRITTEN
from asyncrl.state.samples import Event, Sample, SampleReader, SampleRow, SamplesFile, seal_sample
from asyncrl.telemetry.metric_names import named
from asyncrl.telemetry.plot import draw_reward
from topics.batches import BATCH_PACKED, BatchMember, BatchPacked
from topics.evals import EVAL_SCORED
from topics.topic import ACTORS, BATCHES, ENGINES, GRADES, PROMPTS, TRAINING, TRAJECTORIES, TURNS, Stream, Topic
from topics.wire import Headers, Message, WireError

_MB = 1_000_000
_TOPICS: dict[Event, Topic[Any]] = {"step": BATCH_PACKED, "eval": EVAL_SCORED}
_ROOM_BYTES = 1 << 18  # that the disk must take before a recorder that could not write tries again
_AGAIN_S = 2.0  # between two looks whether it does


class NotWritten(AsyncRLError):
    """A file of the run took no more: its disk is full, or gone."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.errno = error.errno or 0


@contextmanager
def _writing() -> Iterator[None]:
    """Raise NotWritten where a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise NotWritten(error) from error


class Sampler:
    """Reads batches and evaluations one after the other, from where the samples file ends."""

    def __init__(self, context: Context) -> None:
        settings, self._bus = context.config.recorder, context.bus
        self._count = settings.samples
        self._file = SamplesFile(context.files.root, settings.samples_mb * _MB)
        self._reader = SampleReader(context.bus, context.files.model_path(context.config.model))
        self._after: dict[Event, int] = {}  # sequence up to which all messages were read
        self._newest: dict[Event, int] = {}  # sequence up to which there may be some
        self._first = 0  # sequence of the oldest result that was stored at the start

    async def begin(self) -> None:
        """Continue at the end of the file; start again if the file belongs to other logs."""
        if self._count:
            self._first = int((await stream_info(self._bus, TRAJECTORIES))["state"]["first_seq"])
            ends = {event: await last_sequence(self._bus, topic.stream) for event, topic in _TOPICS.items()}
            with _writing():
                self._after = self._file.begin()
                if any(self._after[event] > end for event, end in ends.items()):
                    self._file.path.unlink()
                    self._after = self._file.begin()
            self._newest = ends

    def stored(self, topic: Topic[Message], record: Record) -> None:
        """Take note of a record of the run: there may be samples of it."""
        self._newest |= {event: record.sequence for event, own in _TOPICS.items() if own is topic}

    async def write(self) -> None:
        """Append samples of everything that was stored since."""
        for event, topic in _TOPICS.items() if self._count else ():
            async for sequence, message in self._since(event, topic):
                if isinstance(message, BatchPacked):
                    step, groups = message.step, [group.members for group in message.groups]
                else:
                    step, groups = message.version, [message.members]
                if samples := await self._of(groups):
                    with _writing():
                        self._file.append(SampleRow(event, step, sequence, samples))

    async def _since(self, event: Event, topic: Topic[Any]) -> AsyncIterator[tuple[int, Any]]:
        subject = topic.subject(self._bus.run)
        while self._after[event] < (newest := self._newest[event]):
            record = await read_next(self._bus, topic.stream, subject, self._after[event] + 1)
            if record is None:
                self._after[event] = newest
                return
            self._after[event] = record.sequence
            try:
                message = await read(self._bus, topic.message, record)
            except (WireError, BlobMissing):
                continue  # the log's readers keep it as a dead letter
            yield record.sequence, message

    async def _of(self, groups: list[list[BatchMember]]) -> list[Sample]:
        """One member of each of the first groups, of all groups a second one, and so on."""
        members = chain.from_iterable(zip_longest(*groups))
        found = []
        for member in islice(filter(None, members), self._count):
            if member.payload.sequence < self._first:
                continue  # it was trimmed long ago
            sample = await self._reader.read(member.trajectory_id, member.payload.sequence)
            if sample is not None:
                sample.reward = member.reward
                with suppress(SecretGone):  # purged since it was read
                    found.append(await seal_sample(self._bus, sample))
        return found


class Recorded(msgspec.Struct):
    """The state at a known size of the metrics file."""

    format: str  # of the state: that of another version of this program is of no use
    positions: dict[str, int]  # sequence of the newest message folded, by the name of the stream
    rows_bytes: int
    state: RecorderState


class StoredFold:
    """`recorder.json` of a run: the positions in the logs up to which the rows of `metrics.jsonl` go.

    Rows are appended first, then the position is replaced atomically. If the process is killed between the two, the
    next start truncates the metrics to the recorded size and makes the later rows again.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / "recorder.json"

    def read(self, metrics: Path) -> Recorded | None:
        """Return the record stored last; None if there is none, or it cannot be continued."""
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=Recorded)
            whole = found.format == format_of(RecorderState) and metrics.stat().st_size >= found.rows_bytes
        except (OSError, *UNREADABLE):
            return None
        return found if whole else None

    def store(self, recorded: Recorded) -> None:
        """Replace the record."""
        new = self._path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(msgspec.json.encode(recorded))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)


def began_s(root: Path) -> float:
    """Return when a run began by its newest record, as Unix time.

    Raises:
        DamagedFile: its recorder has stored none.
    """
    path = root / "recorder.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Began).state.first_ns / 1e9
    except (OSError, *UNREADABLE) as error:
        raise DamagedFile(f"{path} does not tell when the run began: {error}; it is written during a run") from error


class _FirstTime(msgspec.Struct):
    first_ns: int


class _Began(msgspec.Struct):
    state: _FirstTime


def _rl_steps(metrics: Path) -> list[StepRow]:
    """The rows of RL steps."""
    with metrics.open("rb") as file:
        rows = [msgspec.convert(named(msgspec.json.decode(line)), StepRow) for line in file]
    return [row for row in rows if row.event == "step" and row.stage == "rl"]


# In this order: the first message of the run gives its beginning, and a batch is packed before it is trained.
_LOGS = (ACTORS, BATCHES, TURNS, TRAINING, GRADES, ENGINES)
_COUNTED_BYTES = 512  # of a message that counts as one of supervision.snapshot_every
_ROWS = 1024  # rows that wait for being written


async def main(context: Context) -> None:
    """Run the recorder: rows during the run, summary and plot when the run ends.

    A failure to write these files ends no run and blocks no actor. The recorder reports the failure, and continues from
    the contents of the files once there is room. All that is missing in them it reads from the logs then.
    """
    sinks = Sinks(context)
    try:
        while not await _recorded(context, sinks):
            await _room(context)
            context.vitals.pop(UNWRITTEN)
    finally:
        sinks.cancel()


async def _recorded(context: Context, sinks: Sinks) -> bool:
    """Run a recorder to its end; returns False if it must continue once there is room for its files."""
    try:
        await Recorder(context, sinks).run()
    except NotWritten as error:
        context.log.error("files are not written", reason=str(error))
        context.vitals[UNWRITTEN] = error.errno
        return context.stop.is_set()
    await sinks.finish()
    return True


async def _room(context: Context) -> None:
    """Return once the run's folder takes files again, or the recorder shall stop."""
    probe = context.files.root / "recorder.room"
    while not context.stop.is_set():
        await first_of(context.stop.wait(), timeout_s=_AGAIN_S)  # no event announces room on a disk
        try:
            probe.write_bytes(bytes(_ROOM_BYTES))
        except OSError:
            continue
        else:
            return
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)


class Recorder:
    """Folds every log, from the positions that its files give."""

    def __init__(self, context: Context, sinks: Sinks) -> None:
        self.context = context
        self.fold = RecorderFold()
        self._news = asyncio.Event()
        self._sink = FileSink(context.files.metrics)
        self._stored = StoredFold(context.files.root)
        self._samples = Sampler(context)
        self._positions = {stream.name: 0 for stream in _LOGS}
        self._sinks = sinks
        self._since = 0  # messages since the positions were stored, large ones more than once
        self._unwritten: NotWritten | None = None  # from then on nothing is folded

    async def run(self) -> None:
        """Follow until asked to stop, then write what the run amounts to.

        Raises:
            NotWritten: a file took no more. Another recorder continues from the contents of the files.
        """
        await self._go_on()
        await self._samples.begin()
        inputs = self.fold.inputs()
        listeners = {stream: self._listener(stream, inputs[stream]) for stream in _LOGS}
        try:
            await self._follow(listeners)
        finally:
            for listener in listeners.values():
                await listener.close()
        # Messages published before the end belong to the summary.
        bus = self.context.bus
        subjects = {stream: [topic.pattern(bus.run) for topic in inputs[stream].topics] for stream in _LOGS}
        rest = [
            Part(stream, subjects=subjects[stream], headers_only=inputs[stream].headers_only, after=one.last)
            for stream, one in listeners.items()
        ]
        await read_merged(bus, rest, self._take, self.context.refuse)
        self._write_rows()
        self._store()
        self.fold.issued = await self._count_issued()
        with _writing():
            await self._summarise()
        await self._samples.write()

    async def _follow(self, listeners: dict[Stream, Listener]) -> None:
        for stream, listener in listeners.items():
            await listener.start(self._positions[stream.name])
            await listener.caught_up()
        if self._sinks.any:
            self._sinks.begin(self.fold.state.first_ns / 1e9)
            self._store()
        while not self.context.stop.is_set():
            self._news.clear()
            self._write_rows()
            await self._samples.write()
            await first_of(self._news.wait(), self.context.stop.wait())

    async def _go_on(self) -> None:
        """Continue from the positions in the files; start again if there are none, or they belong to other logs."""
        bus, recorded = self.context.bus, self._stored.read(self._sink.path)
        if recorded is not None:
            try:
                check_positions(recorded.positions, {log.name: await last_sequence(bus, log) for log in _LOGS})
                self._positions, self.fold.state = recorded.positions, recorded.state
                self.context.log.info("metrics continue", rows_bytes=recorded.rows_bytes, **recorded.positions)
            except WireError:
                recorded = None
        with _writing():
            self._sink.open(Position(bytes=recorded.rows_bytes if recorded is not None else 0))

    async def _summarise(self) -> None:
        root, steps = self.context.files.root, _rl_steps(self._sink.path)
        summary = self.fold.summary(self.context.bus.run, steps)
        summary |= {"trains": self.context.config.trains, "metrics": str(self._sink.path)}
        summary["reports"] = _reports(self.context.files.reports)
        if self.context.config.recorder.plot and steps:
            summary["plot"] = str(root / "reward.png")
            await asyncio.to_thread(
                draw_reward,
                root / "reward.png",
                f"run {self.context.bus.run}: reward of {len(steps)} steps",
                [step.time_s for step in steps],
                rewards=[step.reward_mean for step in steps],
                lags=[step.lag_mean for step in steps],
            )
        write_json(root / "summary.json", summary)

    def _listener(self, stream: Stream, entry: Input) -> Listener:
        bus, refuse = self.context.bus, self.context.refuse
        subjects = [topic.pattern(bus.run) for topic in entry.topics]
        return Listener(bus, stream, self._take, refuse, subjects=subjects, headers_only=entry.headers_only)

    async def _count_issued(self) -> int:
        """Distinct trajectories of RL: the subjects of their log, less those of its keeper, warm-up and evaluations."""
        bus, config = self.context.bus, self.context.config
        info = await stream_info(bus, PROMPTS)
        own = [f"asyncrl.{bus.run}.prompter.*"]
        keepers = len(await read_last_of_each(bus, PROMPTS, own))
        warmup = config.warmup.steps * config.warmup.batch_groups
        return max(0, int(info["state"].get("num_subjects", 0)) - keepers - warmup - self.fold.state.evaluated)

    def _take(self, topic: Topic[Message], message: Message | Headers, record: Record) -> None:
        if self._unwritten is not None:
            return
        self.fold.apply(topic, message, record)
        self._samples.stored(topic, record)
        self._sinks.stored(topic, record)
        self._positions[record.stream.name] = record.sequence
        self._since += 1 + len(record.data) // _COUNTED_BYTES
        try:
            self._write_some()
        except NotWritten as error:  # this is called by the reader of a log, which cannot mend it
            self._unwritten = error
            self._news.set()

    def _write_some(self) -> None:
        if self._since >= self.context.config.supervision.snapshot_every:
            self._write_rows()
            self._store()
        elif len(self.fold.rows) >= _ROWS:
            self._write_rows()
        elif self.fold.rows:
            self._news.set()

    def _write_rows(self) -> None:
        if self._unwritten is not None:
            raise self._unwritten
        rows, self.fold.rows = self.fold.rows, []
        if rows:
            with _writing():
                self._sink.append(rows)
            if self._sinks.any:
                self._store()

    def _store(self) -> None:
        """Store how far the rows in the file go."""
        self._since = 0
        with _writing():
            size = self._sink.sync()
            self._stored.store(Recorded(format_of(RecorderState), self._positions, size, self.fold.state))
        self._sinks.offer(size)


def _reports(folder: Path) -> dict[str, str]:
    """Return the rows that actors of the user's own have left for the summary: objects of texts in JSON files."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found |= msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        except (OSError, *UNREADABLE) as error:
            found[path.stem] = f"not read: {error}"
    return found
