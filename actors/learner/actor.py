"""The learner: a deterministic function of the batch log; publishes steps, versions and checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TypeVar

from actors.learner.fold import LearnerFold
from actors.learner.payloads import Payloads
from actors.runtime.actor import ActorFault, Context
from actors.runtime.keeper import Input, Keeper
from asyncrl.algorithms.batches import BatchStats, GradedTrajectory, build_rows
from asyncrl.bus.log import read_message
from asyncrl.bus.publish import BlobMissing, read
from asyncrl.crash import crash_point
from asyncrl.errors import AsyncRLError
from asyncrl.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    read_checkpoint,
    remove_directory,
    weights_digest,
    write_checkpoint,
    written_aside,
)
from asyncrl.training.objective import batch_rules, open_trainer, skipped_stats, step_spec
from asyncrl.training.protocol import NonFiniteLoss, RowError
from asyncrl.weights.files import FileStore
from topics.actors import SKIP_REQUESTED
from topics.batches import BATCH_PACKED, BatchPacked, BatchTrained
from topics.evals import EvalRequested
from topics.streams import CHECKPOINT_REQUESTED
from topics.topic import ACTORS, BATCHES, FLEET, TRAINING
from topics.weights import (
    CheckpointLost,
    CheckpointSaved,
    TrainingFinished,
    WeightsPublished,
)
from topics.wire import Message, WireError

T = TypeVar("T")


async def main(context: Context) -> None:
    """Run the learner until its steps are done."""
    await Learner(context).run()


class Learner:
    """Trains batch after batch, in the order of the batch log."""

    def __init__(self, context: Context) -> None:
        config = context.config
        self.context = context
        self.config = config
        self.fold = LearnerFold(config)
        inputs = [
            Input(BATCHES, [BATCH_PACKED]),
            Input(FLEET, [CHECKPOINT_REQUESTED]),
            Input(ACTORS, [SKIP_REQUESTED]),
        ]
        self.keeper = Keeper(context, TRAINING, inputs, self.fold)
        self.store = FileStore(context.files.weights)
        self.payloads = Payloads(context.bus, context.config.rollout.temperature)
        self.step = config.origin  # newest step in the weights
        self.lineage = 0
        self.batch_sequence = 0
        self._differed = False  # the weights have other bits than those published
        self._appending: asyncio.Task[None] | None = None
        self._waited_s = 0.0  # for the newest batch
        self._lost: list[CheckpointLost] = []  # that could not be read
        self._resumed = False  # all that was reported trained is in the weights

    async def run(self) -> None:
        """Resume from the log, then train to the end."""
        try:
            await self.keeper.start(self._make_ready)
            if self.context.stop.is_set():
                return
            await self._resume()
            while self.step < self.config.learner.steps and not self.context.stop.is_set():
                await self._train_next(publish=True)
            finished = self.fold.state.finished
            if self.step >= self.config.learner.steps and (finished is None or finished < self.step):
                await self._finish()
        except (NonFiniteLoss, RowError, CheckpointError, ActorFault) as error:
            raise ActorFault(self._advice(error)) from error
        finally:
            await self._appended()
        await self.keeper.close()

    def _advice(self, error: AsyncRLError) -> str:
        """Return the reason why the next step failed, and what to do."""
        step, saved = self.step + 1, self.fold.state.checkpoints
        reason = str(error).removeprefix(f"batch {step}: ")
        words = f"batch {step}: {reason}; the last checkpoint is intact: {saved[-1].path if saved else 'none yet'}"
        if isinstance(error, CheckpointError) or step <= self.fold.state.trained:
            return words
        command = f"asyncrl up --resume {self.context.files.root} --skip-batch {step}"
        return f"{words}; to go on without this batch: {command}"

    async def _make_ready(self) -> None:
        """Load the model and the newest checkpoint, and train again what was trained after it.

        Only then is the log claimed; and a learner that stands by has none of this in memory.
        """
        self.context.doing("loads the model")
        model = self.context.files.model_path(self.config)
        self.trainer = await asyncio.to_thread(open_trainer, self.config, model)
        for saved in reversed(self.fold.state.checkpoints):
            try:
                found = await asyncio.to_thread(load_checkpoint, Path(saved.path), self.trainer)
            except CheckpointError as error:
                self.context.log.warning("checkpoint unusable", path=saved.path, reason=str(error))
                self._lost.append(CheckpointLost(saved.lineage, saved.step, saved.path, str(error)))
                continue
            self.step, self.batch_sequence = found.step, found.batch_sequence
            self.context.log.info("checkpoint loaded", step=self.step, path=saved.path)
            break
        else:
            await self.context.listen(BATCHES, self.fold.recall, [BATCH_PACKED]).read()
            if self.config.start.checkpoint:
                path = self.context.files.base / self.config.start.checkpoint
                await asyncio.to_thread(load_checkpoint, path, self.trainer)
        self._differed = await self._differs()
        await self._train_again()

    async def _train_again(self) -> None:
        while self.step < self.fold.state.trained and not self.context.stop.is_set():
            await self._train_next(publish=False)
            self._differed |= await self._differs()

    async def _resume(self) -> None:
        """Go on from where the log ends, and publish only what differs."""
        await self._train_again()
        await self._append(self._lost)
        await self._appended()
        self.lineage = self.fold.state.lineage
        if self._differed:
            self.lineage += 1
            self.context.log.warning("weights differ from those published; a new lineage begins", lineage=self.lineage)
        if self._publishes(self.step) and (self._differed or self.step not in self.fold.state.published):
            await self._append([await self._publish()])
        await self._ask_for_evaluation()
        await self._save_if_due()  # it may have died between a step and its checkpoint
        self._resumed = True

    async def _digest(self) -> str:
        return await asyncio.to_thread(lambda: weights_digest(self.trainer.weights()))

    async def _differs(self) -> bool:
        """Return whether these weights were published with other bits."""
        published = self.fold.state.published.get(self.step)
        return published is not None and published != await self._digest()

    async def _train_next(self, *, publish: bool) -> None:
        """Fetch and train one batch. Its messages reach the log while the next step is under way."""
        found = await self._batch(self.step + 1)
        if found is None:
            return
        packed, sequence = found
        skips, metrics = self.fold.skips(packed.step), dict[str, float]()
        if skips:
            self.context.log.warning("batch skipped", step=packed.step)
            stats = skipped_stats(packed)
        else:
            stats, metrics = await self._trained_on(packed)
        self.step, self.batch_sequence = packed.step, sequence
        if not publish:
            return
        crash_point("learner.stepped")
        decisions: list[Message] = [self._trained(packed, stats, metrics, skipped=skips)]
        if self._publishes(self.step):
            decisions.append(await self._publish())
        await self._append(decisions)
        self.context.vitals.update(step=self.step, reward=stats.reward_mean)
        await self._ask_for_evaluation()
        await self._save_if_due()

    async def _trained_on(self, packed: BatchPacked) -> tuple[BatchStats, dict[str, float]]:
        groups = await self.payloads.take(packed)
        began = time.monotonic()
        self.context.doing(f"trains batch {packed.step}")
        updating = asyncio.to_thread(self._update, packed, groups)
        stats, metrics = await self._while_fetching(packed.step + 1, updating)
        metrics |= {"train_s": round(time.monotonic() - began, 4), "wait_s": round(self._waited_s, 4)}
        return stats, metrics

    def _update(
        self, packed: BatchPacked, groups: Sequence[Sequence[GradedTrajectory]]
    ) -> tuple[BatchStats, dict[str, float]]:
        """Make the rows of a batch and step, in a thread of its own: large batches take seconds for either."""
        rows, stats = build_rows(groups, batch_rules(self.config, packed))
        return stats, self.trainer.step(rows, step_spec(self.config, packed.step))

    def _trained(
        self, packed: BatchPacked, stats: BatchStats, metrics: dict[str, float], *, skipped: bool
    ) -> BatchTrained:
        supervised = {-1: stats.tokens_trained}
        return BatchTrained(
            step=packed.step,
            lineage=self.lineage,
            stage=packed.stage,
            metrics=metrics,
            lags=supervised if packed.stage == "warmup" else stats.lag_histogram,
            masked=stats.tokens_stale,
            rewards=[stats.reward_mean, stats.reward_std],
            trajectories=stats.trajectories,
            batch_sequence=self.batch_sequence,
            skipped=skipped,
        )

    def _publishes(self, step: int) -> bool:
        always = (self.config.start.step, self.config.learner.steps)
        return step >= 0 and (step % self.config.learner.publish_every == 0 or step in always)

    async def _publish(self) -> WeightsPublished:
        """Put the weights into the store and return the message that announces them."""
        message = await asyncio.to_thread(self.store.publish, self.trainer, lineage=self.lineage, version=self.step)
        crash_point("weights.renamed")
        return message

    async def _ask_for_evaluation(self) -> None:
        settings = self.config.eval
        ends = (self.config.start.step, self.config.learner.steps)
        due = self.step in ends or (settings.every and self.step % settings.every == 0)
        name, asked = f"v{self.step:06d}", self.fold.state.evaluated
        if settings.prompts and due and self.step >= 0 and (asked is None or asked < self.step):
            await self._append([EvalRequested(name, self.step, settings.prompts, settings.temperature)])

    async def _save_if_due(self) -> None:
        if self.fold.wants_checkpoint(self.step, every=self.config.learner.checkpoint_every):
            await self._save()

    async def _save(self) -> None:
        """Write a checkpoint; it counts once it is published."""
        self.context.doing(f"saves checkpoint {self.step}")
        await self._appended()
        crash_point("learner.saving")
        if any(saved.step == self.step and saved.lineage == self.lineage for saved in self.fold.state.checkpoints):
            return
        digest = await self._digest()
        checkpoint = Checkpoint(self.lineage, self.step, digest, self.batch_sequence)
        path = await asyncio.to_thread(write_checkpoint, self.context.files.checkpoints, checkpoint, self.trainer.save)
        await asyncio.to_thread(read_checkpoint, path)  # what cannot be read back must not count
        crash_point("checkpoint.renamed")
        message = CheckpointSaved(self.lineage, self.step, digest, str(path), self.batch_sequence)
        await self._append([message])
        await self._appended()
        crash_point("checkpoint.published")

    async def _finish(self) -> None:
        """Write the last checkpoint and the exported model, and publish that training has finished."""
        await self._save()
        exported = self.context.files.root / "exported"
        await asyncio.to_thread(self._export, exported)
        crash_point("learner.exported")
        await self._append([TrainingFinished(self.step, "steps", str(exported))])

    def _export(self, directory: Path) -> None:
        """Write the model; an existing one is of fewer steps, or of a learner that died before it announced it."""
        if directory.exists():
            remove_directory(directory)
        with written_aside(directory) as aside:
            self.trainer.export(aside)

    async def _append(self, decisions: Sequence[Message]) -> None:
        """Start to publish a message, behind all that were published before it."""
        await self._appended()
        self._appending = asyncio.create_task(self.keeper.append_until_stored(decisions))
        self.context.watch(self._appending)

    async def _appended(self) -> None:
        """Wait until everything published is on the log and read back."""
        saying, self._appending = self._appending, None
        if saying is not None:
            await saying

    async def _batch(self, step: int) -> tuple[BatchPacked, int] | None:
        """A batch and its sequence, once it is packed; None when the actor shall stop first."""
        began = time.monotonic()
        self.context.doing(f"waits for batch {step}")
        while (sequence := self.fold.sequence(step)) is None and not self.context.stop.is_set():
            if self._resumed and self.fold.wants_checkpoint(self.step):
                await self._save()
            await self.keeper.changes()
        self._waited_s = time.monotonic() - began
        self.context.count("waited_s", self._waited_s)
        return None if sequence is None else (await self._packed(step, sequence), sequence)

    async def _packed(self, step: int, sequence: int) -> BatchPacked:
        """A batch, by its sequence in the batch log."""
        packed = self.fold.at_hand(step)
        if packed is not None:
            return packed
        record = await read_message(self.context.bus, BATCHES, sequence)
        if record is None:
            raise ActorFault(f"batch {step}: message {sequence} of {BATCHES.name} is gone")
        try:
            return await read(self.context.bus, BatchPacked, record)
        except (BlobMissing, WireError) as error:
            raise ActorFault(f"batch {step}: message {sequence} of {BATCHES.name}: {error}") from error

    async def _while_fetching(self, step: int, work: Coroutine[None, None, T]) -> T:
        """The result of some work; should the batch of `step` be packed meanwhile, its tokens are fetched."""
        working = asyncio.create_task(work)
        while self.fold.sequence(step) is None and not (working.done() or self.context.stop.is_set()):
            news = asyncio.create_task(self.keeper.changes())
            await asyncio.wait({working, news}, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
        sequence = self.fold.sequence(step)
        if sequence is not None and not self.fold.skips(step):
            self.payloads.begin(await self._packed(step, sequence))
        return await working
