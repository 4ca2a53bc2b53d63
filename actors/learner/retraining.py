"""Train again from the logs of a run: the learner's own steps, without engines, publishing nothing."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from actors.learner.fetching import fetch_trajectories
from actors.learner.teacher import TeacherServer
from asyncrl.algorithms.batches import GradedGroup, build_rows, skipped_stats
from asyncrl.algorithms.named import AlgorithmError
from asyncrl.bus.connection import Bus
from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.bus.merged_reader import read_log
from asyncrl.config.settings import Config
from asyncrl.errors import AsyncRLError
from asyncrl.run.directory import RunFiles
from asyncrl.state.records import spans_text
from asyncrl.training.checkpoint import Checkpoint, CheckpointError, OtherModel, read_checkpoint
from asyncrl.training.objective import with_other_settings
from asyncrl.training.protocol import NonFiniteLoss, RowError, Trainer
from asyncrl.training.publisher import Publisher
from asyncrl.weights.files.store import FileStore
from topics.batches import BatchPacked, BatchTrained
from topics.topic import BATCHES, TRAINING, TRAJECTORIES
from topics.trajectories import TrajectoryGeneratedHeaders
from topics.weights import CheckpointSaved, WeightsPublished

_PATIENCE_S = 60.0  # with a teacher that is a server


class ReplayError(AsyncRLError):
    """A run that cannot be trained again as asked."""


class Origin(NamedTuple):
    """A starting point of a replay."""

    step: int
    checkpoint: Path | None  # None: the untrained model

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint.name}" if self.checkpoint else "the untrained model"


class TrainingLog(Fold):
    """The batches, steps, versions and checkpoints of a run; a newer lineage replaces the steps of an older one."""

    def __init__(self) -> None:
        self.batches: dict[int, tuple[BatchPacked, int]] = {}  # by step, with their sequence
        self.trained: dict[int, BatchTrained] = {}
        self.published: dict[int, str] = {}  # digests by version
        self.checkpoints: list[CheckpointSaved] = []
        self.results: set[int] = set()  # sequences of the results that are still stored
        self.unreadable = 0

    def _on_packed(self, message: BatchPacked, record: Record) -> None:
        self.batches[message.step] = (message, record.sequence)

    def _on_trained(self, message: BatchTrained, _record: Record) -> None:
        self.trained[message.step] = message

    def _on_published(self, message: WeightsPublished, _record: Record) -> None:
        self.published[message.version] = message.digest

    def _on_saved(self, message: CheckpointSaved, _record: Record) -> None:
        self.checkpoints.append(message)

    def _on_generated(self, _headers: TrajectoryGeneratedHeaders, record: Record) -> None:
        self.results.add(record.sequence)

    def refuse(self, record: Record, error: Exception) -> None:
        self.unreadable += 1

    def batch(self, step: int) -> tuple[BatchPacked, int]:
        """A batch and its sequence.

        Raises:
            ReplayError: the log does not hold it.
        """
        if step not in self.batches:
            unread = f"; {self.unreadable} messages there cannot be read" if self.unreadable else ""
            raise ReplayError(f"batch {step} is not on the log, which has {spans_text(self.batches)}{unread}")
        return self.batches[step]

    def has_tokens(self, packed: BatchPacked) -> bool:
        """Return whether all tokens of a batch are stored, once the log of trajectories was read."""
        return all(member.payload.sequence in self.results for group in packed.groups for member in group.members)


async def read_training(bus: Bus) -> TrainingLog:
    """Read the trained steps of a run, and then the batches, so that a running run has the batch of each step."""
    log = TrainingLog()
    for stream in (TRAINING, BATCHES):
        await read_log(bus, stream, log)
    return log


class Retraining:
    """Takes a trainer through the batches of a run once more."""

    def __init__(self, bus: Bus, log: TrainingLog, trainer: Trainer, config: Config, files: RunFiles) -> None:
        self.step = config.origin  # newest step in the weights
        self._bus = bus
        self._log = log
        self._trainer = trainer  # with the model as it was before the run
        self._config = config  # settings of the replay: if they differ from those of the run, its objectives differ too
        self._files = files
        self._recorded = files.read_config()
        self._teacher = TeacherServer(config, files, patience_s=_PATIENCE_S) if config.learner.teacher.url else None

    async def begin(self, at: int | None, until: int) -> str:
        """Load the starting point of the replay; returns its description.

        Args:
            at: begin with this step's weights or the nearest before it; None begins as early as possible.
            until: last step of the replay.

        Raises:
            ReplayError: the tokens that come after every possible beginning are gone, or a checkpoint is of another
                model than these settings describe.
        """
        trimmed = await self._trimmed(until)
        reasons = [f"the tokens of batch {trimmed} and before are trimmed"] if trimmed > self._config.origin else []
        latest = until if at is not None or until == self._config.origin else until - 1  # no steps prove nothing
        for origin in self._origins(at):
            if trimmed <= origin.step <= latest:
                try:
                    if origin.checkpoint is not None:
                        await asyncio.to_thread(read_checkpoint, origin.checkpoint)  # verifies its files
                        await asyncio.to_thread(self._load, origin.checkpoint)
                except CheckpointError as error:
                    reasons.append(str(error))
                    continue
                self.step = origin.step
                return "; ".join([str(origin), *reasons])
        place = "" if at is None else f" at step {at} or before"
        left = ", ".join(str(origin.step) for origin in self._saved()) or "none"
        advice = f"checkpoints are left of step {left}; nats.keep = run keeps all tokens of a run"
        raise ReplayError("; ".join([f"the replay cannot begin{place}", *reasons, advice]))

    def _load(self, checkpoint: Path) -> None:
        try:
            self._trainer.load(checkpoint)
        except (CheckpointError, OtherModel) as error:  # a part may be in the weights: nothing else can begin there
            raise ReplayError(f"{checkpoint} is whole, but it cannot be loaded with these settings: {error}") from error

    def _origins(self, at: int | None) -> Iterator[Origin]:
        """All it could begin with, the best first."""
        start = self._config.start.checkpoint
        known = [Origin(self._config.origin, self._files.base / start if start else None)]
        known += self._saved()
        yield from known if at is None else (origin for origin in reversed(known) if origin.step <= at)

    def _saved(self) -> list[Origin]:
        """Checkpoints that are still there."""
        origins = [Origin(saved.step, Path(saved.path)) for saved in self._log.checkpoints]
        return [origin for origin in origins if origin.checkpoint is not None and origin.checkpoint.exists()]

    async def _trimmed(self, until: int) -> int:
        """Return the newest batch whose tokens are trimmed, or the step before the first batch."""
        await read_log(self._bus, TRAJECTORIES, self._log)
        for step in range(until, self._config.origin, -1):
            if not self._skips(step) and not self._log.has_tokens(self._log.batch(step)[0]):
                return step
        return self._config.origin

    async def steps(self, until: int) -> AsyncIterator[ReplayedStep]:
        """Train up to a step; each is yielded with what the run reported of it.

        Raises:
            ActorFault: tokens are gone, or are not those that were graded.
            ReplayError: the step cannot be made with these settings.
        """
        coming: asyncio.Task[tuple[BatchPacked, list[GradedGroup]]] | None = None
        try:
            while self.step < until:
                packed, groups = await (coming or self._rows_of(self.step + 1))
                coming = asyncio.create_task(self._rows_of(packed.step + 1)) if packed.step < until else None
                yield await asyncio.to_thread(self._train, packed, groups)
        finally:
            if self._teacher is not None:
                await self._teacher.close()

    async def _rows_of(self, step: int) -> tuple[BatchPacked, list[GradedGroup]]:
        """A batch as the settings of the replay make it, and its groups."""
        packed = with_other_settings(self._log.batch(step)[0], self._recorded, self._config)
        groups = [] if self._skips(step) else await fetch_trajectories(self._bus, packed)
        return packed, groups if self._teacher is None else await self._teacher.fill(packed.objective, groups)

    def _train(self, packed: BatchPacked, groups: Sequence[GradedGroup]) -> ReplayedStep:
        began, step = time.monotonic(), packed.step
        if self._skips(step):
            stats, metrics = skipped_stats(packed), {}
        else:
            rows, stats = build_rows(groups, packed.objective, step=step, min_version=packed.min_version)
            try:
                metrics = self._trainer.step(rows, packed.objective)
            except (AlgorithmError, NonFiniteLoss, RowError) as error:
                raise ReplayError(f"step {step}: {error}") from error
            metrics["train_s"] = round(time.monotonic() - began, 4)
        self.step = step
        trained, published = self._log.trained[step], self._log.published.get(step, "")
        digest = self._digest() if published else ""
        recorded = {"reward_mean": trained.rewards[0], "masked_tokens": float(trained.masked), **trained.metrics}
        replayed = {"reward_mean": stats.reward_mean, "masked_tokens": float(stats.tokens_stale), **metrics}
        purged = sum(not member.segments for group in groups for member in group.members)
        return ReplayedStep(step, packed.stage, recorded, replayed, published, digest, purged)

    def _skips(self, step: int) -> bool:
        """Return whether the run passed over a batch; so does its replay."""
        return step in self._log.trained and self._log.trained[step].skipped

    def save(self, folder: Path) -> Path:
        """Write a checkpoint of the newest step into a folder; its lineage is 0, for it belongs to no run yet.

        Raises:
            CheckpointError: the disk refused it.
        """
        sequence = self._log.batches[self.step][1] if self.step in self._log.batches else 0
        publisher = self._publisher(folder)
        publisher.copy_state()
        return publisher.save(Checkpoint(0, self.step, self._digest(), sequence))

    def export(self, directory: Path) -> None:
        """Write the newest weights as a model.

        Raises:
            CheckpointError: the disk refused it.
        """
        publisher = self._publisher()
        publisher.copy_weights(whole=True)
        publisher.export(directory)

    def _digest(self) -> str:
        """Identity of the present weights."""
        publisher = self._publisher()
        publisher.copy_weights()
        return publisher.digest()

    def _publisher(self, checkpoints: Path | None = None) -> Publisher:
        files = self._files
        return Publisher(self._trainer, store=FileStore(files.weights), checkpoints=checkpoints or files.checkpoints)


class ReplayedStep(NamedTuple):
    """One optimiser step of both."""

    step: int
    stage: str
    recorded: dict[str, float]  # metrics by name, units in the names
    replayed: dict[str, float]
    published: str  # digest of the version that was published after it; "" if no version was
    digest: str  # of the replay's weights there
    purged: int = 0  # trajectories that were trained, and have no tokens any more


def first_difference(steps: Sequence[ReplayedStep]) -> ReplayedStep | None:
    """The first step after which other weights were published than the replay has."""
    return next((step for step in steps if step.published != step.digest), None)


def columns(steps: Sequence[ReplayedStep]) -> dict[str, list[tuple[int, float, float]]]:
    """(step, recorded, replayed) of every metric that both have, over the steps of RL if there are any."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for step in [step for step in steps if step.stage == "rl"] or steps:
        for name in step.recorded:
            if name in step.replayed:
                found.setdefault(name, []).append((step.step, step.recorded[name], step.replayed[name]))
    return found


def medians(steps: Sequence[ReplayedStep]) -> dict[str, tuple[float, float]]:
    """Median (recorded, replayed) of each of the columns."""
    return {
        name: (statistics.median(was for _, was, _ in column), statistics.median(now for _, _, now in column))
        for name, column in columns(steps).items()
    }


def medians_text(steps: Sequence[ReplayedStep]) -> str:
    """The medians as a table, one metric a line."""
    found = medians(steps)
    width = max(map(len, found), default=0)
    lines = [f"{'median of a step':>{width}}  {'recorded':>12}  {'replayed':>12}"]
    lines += [f"{name:>{width}}  {was:>12.6g}  {now:>12.6g}" for name, (was, now) in found.items()]
    return "\n".join(lines)
