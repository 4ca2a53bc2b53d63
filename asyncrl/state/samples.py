"""Samples of a run, as people read them: from its results, or from the file that outlives their tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.connection import Bus
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import Record, read_message
from asyncrl.bus.merged_reader import read_each
from asyncrl.bus.publish import read
from asyncrl.bus.sealing import open_under, seal_under
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.errors import AsyncRLError
from asyncrl.files import open_private, write_private
from asyncrl.run.connect import FoundRun, opened
from asyncrl.state.records import evaluation_text, spans_text
from topics.batches import BATCH_PACKED, BatchMember, BatchPacked
from topics.evals import EVAL_SCORED, EvalScored
from topics.prompts import LIVE_TASK, ONLY_TASK, PromptRow
from topics.topic import TRAJECTORIES
from topics.trajectories import Outcome, Segment, TrajectoryGenerated
from topics.wire import WireError

Event: TypeAlias = Literal["step", "eval"]

_SHOWN_BYTES = 4_000  # of an artefact
_LARGEST = 4  # no row takes more than this part of the file


class Turn(msgspec.Struct):
    """A part of a conversation."""

    sampled: bool  # by the policy; otherwise observed: a tool's answer, or other text of the rollout function
    text: str


class Sample(msgspec.Struct):
    """One answer of the policy."""

    name: str  # of the trajectory
    reward: float | None  # None if it is not graded, or was not looked up
    prompt: Any
    completion: str  # the text that was graded
    label: Any
    tokens: int | None = None  # sampled
    truncated: bool = False
    hybrid: bool = False
    turns: list[Turn] = []  # the text after the prompt, if it is more than one answer
    metrics: dict[str, float] = {}  # that the rollout function gave
    artefacts: dict[str, str] = {}  # the beginnings of those
    task: str = ONLY_TASK
    turn_rewards: list[float] = []  # that the rollout function gave, of each `generate`
    secret: str = ""  # data keys of a turn of live traffic
    sealed: bytes = b""  # in a file: the whole sample, encrypted under these


class SampleRow(msgspec.Struct):
    """A line of the file: samples of one batch or evaluation."""

    event: Event
    step: int  # of the batch, or version that was evaluated
    sequence: int  # of the message about it: in BATCHES
    samples: list[Sample]


class SampleReader:
    """Reads the results of a run's trajectories as samples."""

    def __init__(self, bus: Bus, model: Path | None) -> None:
        self._bus = bus
        self._model = model  # directory with the tokenizer; None on another machine: turns cannot be read

    async def read(self, trajectory_id: str, sequence: int) -> Sample | None:
        """The result with this sequence in TRAJECTORIES; None if it was trimmed or cannot be read."""
        try:
            generated = await self.result(sequence)
        except SecretGone as error:
            return gone_sample(trajectory_id, error)
        return None if generated is None else self.sample_of(generated)

    async def result(self, sequence: int) -> TrajectoryGenerated | None:
        """Return the result with this sequence, with its tokens; None if it was trimmed or cannot be read.

        Raises:
            SecretGone: its data key was erased.
        """
        record = await read_message(self._bus, TRAJECTORIES, sequence)
        if record is None:
            return None
        try:
            return await read(self._bus, TrajectoryGenerated, record)
        except (WireError, BlobMissing):
            return None

    def sample_of(self, generated: TrajectoryGenerated) -> Sample:
        """Return a result as a sample."""
        rows = generated.rows or [PromptRow("")]
        row = rows[min(generated.member, len(rows) - 1)]  # siblings of live turns have one each
        tokens = sum(count.tokens for count in generated.versions)
        turns = self._turns(generated.segments)
        if generated.rows and turns and not turns[0].sampled:
            turns = turns[1:]  # the prompt
        outcome = generated.outcome or Outcome()
        return Sample(
            generated.trajectory_id,
            outcome.reward,
            self._live_prompt(generated.segments) if generated.task == LIVE_TASK else row.prompt,
            generated.completion,
            row.label,
            tokens,
            generated.truncated,
            generated.hybrid,
            turns,
            outcome.metrics,
            {name: _shown(value) for name, value in outcome.artefacts.items()},
            generated.task,
            outcome.turn_rewards,
            generated.secret,
        )

    @cached_property
    def tokenizer(self) -> TaskTokenizer | None:
        """The tokenizer of the run's model; None on another machine."""
        try:
            return TaskTokenizer.load(self._model) if self._model is not None else None
        except TokenizerError:
            return None

    def _live_prompt(self, segments: list[Segment]) -> str:
        """The text before the first sampled token: the row of a live turn names the turn, and has none."""
        if self.tokenizer is None:
            return "(the prompt of a live turn is shown where the run's directory is: its tokenizer reads it)"
        observed = [segment.tokens[: int(segment.mask.argmax())] for segment in segments[:1]]
        return "".join(self.tokenizer.decode_all(tokens.tolist()) for tokens in observed)

    def _turns(self, segments: list[Segment]) -> list[Turn]:
        """Split segments where sampled tokens begin and end; empty for one prompt with one answer."""
        changes = [np.flatnonzero(np.diff(segment.mask)) + 1 for segment in segments]
        if (len(segments) < 2 and all(len(at) < 2 for at in changes)) or self.tokenizer is None:
            return []
        turns = []
        for segment, at in zip(segments, changes, strict=True):
            for tokens, mask in zip(np.split(segment.tokens, at), np.split(segment.mask, at), strict=True):
                turns.append(Turn(bool(mask.any()), self.tokenizer.decode_all(tokens.tolist())))
        return turns


def gone_sample(name: str, error: Exception) -> Sample:
    """Return the remains of a purged sample."""
    return Sample(name, None, None, f"(nothing can be read: {error})", None)


async def seal_sample(bus: Bus, sample: Sample) -> Sample:
    """Return a sample for a file; of one that may be read by all, itself.

    Raises:
        SecretGone: its data key is not there.
    """
    if not sample.secret:
        return sample
    sealed = await seal_under(bus, sample.secret, _sealed_as(sample), msgspec.json.encode(sample))
    return Sample(sample.name, sample.reward, None, "", None, task=sample.task, secret=sample.secret, sealed=sealed)


async def open_sample(bus: Bus, sample: Sample) -> Sample:
    """Return a sample of a file with its texts, or with the reason why it has none."""
    if not sample.sealed:
        return sample
    try:
        opened = await open_under(bus, sample.secret, _sealed_as(sample), sample.sealed)
        return msgspec.json.decode(opened, type=Sample)
    except (SecretGone, WireError, msgspec.MsgspecError) as error:
        return gone_sample(sample.name, error)


def _sealed_as(sample: Sample) -> bytes:
    return f"sample:{sample.name}".encode()


def _shown(artefact: bytes) -> str:
    """Return an artefact as text, cut if it is long."""
    text = artefact[:_SHOWN_BYTES].decode(errors="replace")
    return text if len(artefact) <= _SHOWN_BYTES else f"{text} ... ({len(artefact):,} bytes)"


class SamplesFile:
    """`samples.jsonl` of a run. Its own rows hold its position, and it stays below a size: when it is full, rows go."""

    def __init__(self, root: Path, max_bytes: int = 0) -> None:
        self.path = root / "samples.jsonl"
        self._max_bytes = max_bytes  # its largest size; unused if the file is only read

    def rows(self) -> Iterator[SampleRow]:
        """All readable rows: the last one may be unfinished, others may be of another version."""
        decoder = msgspec.json.Decoder(SampleRow)
        if self.path.exists():
            with self.path.open("rb") as file:
                for line in file:
                    with contextlib.suppress(msgspec.MsgspecError):
                        yield decoder.decode(line)

    def begin(self) -> dict[Event, int]:
        """Remove a row that was not written whole; returns the sequence of the newest message with a row, by event."""
        with open_private(self.path, "a+b") as file:
            self.path.chmod(0o600)
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        newest: dict[Event, int] = {"step": 0, "eval": 0}
        for row in self.rows():
            newest[row.event] = max(newest[row.event], row.sequence)
        return newest

    def append(self, row: SampleRow) -> None:
        """Write a row at the end, without those samples that would take too large a part of the file."""
        while len(line := msgspec.json.encode(row) + b"\n") > self._max_bytes // _LARGEST and row.samples:
            row.samples.pop()
        with open_private(self.path, "ab") as file:
            full = file.tell() + len(line) > self._max_bytes
        if full:
            self._thin(len(line))
        with open_private(self.path, "ab") as file:
            file.write(line)

    def _thin(self, needed: int) -> None:
        """Keep rows spread evenly over the run, the newest among them, until this many bytes are free."""
        lines = [(row, msgspec.json.encode(row) + b"\n") for row in self.rows()]
        while sum(len(line) for _, line in lines) + needed > self._max_bytes:
            first, parts = min(row.step for row, _ in lines), len(lines) // 3
            span = max(row.step for row, _ in lines) - first + 1
            kept = {(row.event, (row.step - first) * parts // span): (row, line) for row, line in lines}
            lines = list(kept.values()) if len(kept) < len(lines) else lines[1:]
        write_private(self.path, b"".join(line for _, line in lines))


class Chosen(NamedTuple):
    """A batch or an evaluation whose samples are wanted."""

    event: Event
    step: int
    members: list[BatchMember]
    title: str


def sample_reader(bus: Bus, found: FoundRun) -> SampleReader:
    """A reader of the run's results, with its tokenizer where the run's directory is on this machine."""
    local = found.root is not None
    return SampleReader(bus, found.files.model_path(found.files.read_config().model) if local else None)


async def packed_batch(bus: Bus, step: int | None) -> Chosen:
    """The batch of a step, or the newest one.

    Raises:
        AsyncRLError: there is none.
    """
    newest: dict[int | None, BatchPacked] = {}
    there: set[int] = set()

    def take(packed: BatchPacked, _record: Record) -> None:
        there.add(packed.step)
        if step in (None, packed.step):
            newest[step] = packed

    await read_each(bus, BATCH_PACKED, take)
    if step not in newest:
        which = "" if step is None else f" {step}; there are: {spans_text(there)}"
        raise AsyncRLError(f"run {bus.run} has packed no batch{which}")
    return training_batch(newest[step])


def training_batch(packed: BatchPacked) -> Chosen:
    """A batch whose samples are wanted."""
    members = [member for group in packed.groups for member in group.members]
    return Chosen("step", packed.step, members, f"batch {packed.step} ({packed.stage})")


async def scored_evaluation(bus: Bus, version: int, dataset: str | None = None) -> Chosen:
    """The evaluation of a version, of some held-out set or the newest of any.

    Raises:
        AsyncRLError: there is none.
    """
    scored = await evaluation_of(bus, version, dataset)
    return Chosen("eval", version, scored.members, evaluation_text(scored))


async def evaluation_of(bus: Bus, version: int, dataset: str | None) -> EvalScored:
    """The score of a version on a held-out set, or its newest one on any.

    Raises:
        AsyncRLError: there is none.
    """
    newest: dict[int, EvalScored] = {}

    def take(scored: EvalScored, _record: Record) -> None:
        if dataset in (None, scored.dataset):
            newest[scored.version] = scored

    await read_each(bus, EVAL_SCORED, take)
    if version not in newest:
        of_set, known = f" on {dataset}" if dataset else "", ", ".join(map(str, newest)) or "none"
        raise AsyncRLError(f"run {bus.run} has no evaluation of version {version}{of_set}; there are: {known}")
    return newest[version]


async def samples_of(bus: Bus, chosen: Chosen, found: FoundRun, count: int) -> tuple[str, list[Sample]]:
    """Samples from the logs if they hold as many as are wanted, else from there or the file, whichever has more.

    Args:
        count: how many are wanted; 0 for all.

    Returns:
        A title for them, and the samples.

    Raises:
        AsyncRLError: neither has any.
    """
    members = chosen.members
    wanted = min(count or len(members), len(members))
    reader, samples, source = sample_reader(bus, found), [], "from the logs"
    for member in members:
        sample = await reader.read(member.trajectory_id, member.payload.sequence)
        if sample is not None:
            sample.reward = member.reward
            samples.append(sample)
        if len(samples) == wanted:
            break
    kept: dict[int, list[Sample]] = {}  # by step
    if len(samples) < wanted and found.root is not None:
        for row in SamplesFile(found.root).rows():
            if row.event == chosen.event:
                kept.setdefault(row.step, []).extend(row.samples)  # a version has an evaluation of each held-out set
        names = {member.trajectory_id for member in members}
        own = [await open_sample(bus, sample) for sample in kept.get(chosen.step, []) if sample.name in names]
        if len(own) > len(samples):
            samples, source = own[:wanted], "from samples.jsonl, since tokens were trimmed"
    if members and not samples:
        nearest = sorted(sorted(kept, key=lambda step: abs(step - chosen.step))[:2])
        has = f"does not have it; the nearest there: {', '.join(map(str, nearest))}" if nearest else "does not have it"
        raise AsyncRLError(
            f"run {bus.run}: the tokens of {chosen.title} were trimmed, and samples.jsonl {has} "
            "(nats.keep = run keeps all tokens)"
        )
    return f"run {bus.run}, {chosen.title}: {len(samples)} of {len(members)} trajectories, {source}", samples


class WantedSamples(NamedTuple):
    """Which samples of a run are wanted."""

    step: int | None = None  # of the batch; None: of the newest one
    version: int | None = None  # of the weights, for its evaluation instead
    dataset: str | None = None  # held-out set of the evaluation; None: the newest on any
    most: int = 8  # samples; 0 for all


async def read_samples(found: FoundRun, wanted: WantedSamples) -> tuple[str, list[Sample]]:
    """Read samples of a run, live or over, with a title for them.

    Raises:
        AsyncRLError: there are none.
        RunNotFound: the run cannot be reached.
    """
    async with opened(found, "samples") as bus:
        if wanted.version is None:
            chosen = await packed_batch(bus, wanted.step)
        else:
            chosen = await scored_evaluation(bus, wanted.version, wanted.dataset)
        return await samples_of(bus, chosen, found, wanted.most)
