"""The learner: a deterministic function of the batch log; publishes steps, versions and checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import msgspec

from actors.learner.assertions import assert_step
from actors.learner.elastic import ElasticGroup
from actors.learner.fetching import read_batch
from actors.learner.fold import Evaluations, LearnerFold
from actors.learner.gpu_handoff import Turns
from actors.learner.group import GroupLost, Stopping, TrainerGroup, new_group
from actors.learner.outbox import Outbox, Version, offload, published_by, report_unchanged, step_record
from actors.learner.prefetch import fetch_once_packed, gathered
from actors.learner.profiles import StepProfiles
from actors.learner.publication import copied_digest, export_model, save_checkpoint, step
from actors.learner.rank import StepResult
from actors.learner.rank_wire import ERRORS
from actors.learner.step_times import StepTimes
from actors.learner.teacher_fault import TeacherFault
from actors.learner.weight_handles import Offers
from actors.runtime.actor import ActorDown, ActorFault, Context
from actors.runtime.keeper import Keeper
from asyncrl.algorithms.batches import skipped_stats
from asyncrl.bus.merged_reader import Part, read_merged
from asyncrl.crash import crash_point
from asyncrl.process import RestartPolicy
from asyncrl.training.anomalies import Recent
from asyncrl.training.checkpoint import Checkpoint, CheckpointError, OtherModel, read_checkpoint
from asyncrl.training.protocol import NonFiniteWeights, Trainer
from asyncrl.training.publisher import Publisher
from topics.actors import Activity
from topics.batches import BATCH_PACKED, BatchPacked
from topics.topic import BATCHES, TRAINING
from topics.weights import (
    CheckpointLost,
    CheckpointSaved,
    TrainingFinished,
    WeightsPublished,
    WeightsRejected,
)

RESAVE_S = 10.0  # of training again, between two checkpoints


async def main(context: Context) -> None:
    """Run the learner until its steps are done."""
    await Learner(context).run()


class Learner:
    """Trains batch after batch, in the order of the batch log."""

    def __init__(self, context: Context) -> None:
        self.context, self.config = context, context.config
        self.fold = LearnerFold(self.config)
        self.keeper, self._profiles = Keeper(context, TRAINING, self.fold), StepProfiles(context, self.fold)
        self.turns = Turns(context, self.keeper, self.fold)
        self.offers = Offers(context, lambda: self.group.ask(Publisher.shared))
        self._begin()

    def _begin(self) -> None:
        """Forget what this process did since it began: what counts is on the log."""
        self.offers.forget()
        self.group = self._new_group()
        self.outbox = Outbox(self.keeper)
        self.step = self.config.origin  # newest step in the weights
        self.lineage = self.batch_sequence = 0
        self._moved = self.step  # newest step that moved the weights of the policy
        self._version: asyncio.Task[WeightsPublished] | None = None  # that is being written
        self._newest: WeightsPublished | None = None  # that was written here
        self._checkpoint: asyncio.Task[None] | None = None  # that is being written
        self._begun = self.config.origin  # step of the newest checkpoint that was begun here
        self._evaluations = Evaluations(self.config, self.fold)
        self._times = StepTimes(self.context.files.model_path(self.config.model), self.config.learner)
        self._answered = 0  # sequence of the newest weights.published whose refusal was answered
        self._lost: list[CheckpointLost] = []  # that could not be read
        self._recent = Recent(self.config.learner.assertions.outlier)
        self._resumed = False  # all that was reported trained is in the weights

    def _new_group(self) -> TrainerGroup:
        make = ElasticGroup if self.config.learner.elastic_s else new_group
        return make(self.context, self.keeper.wake)

    async def _copy_weights(self, *, whole: bool = False) -> None:
        """Copy the weights away, for a digest and a version, whole ones for a model; those before must be written."""
        await self.turns.take()
        await self.group.ask(Publisher.copy_weights, whole)

    async def run(self) -> None:
        """Resume from the log, then train to the end."""
        try:
            await self.keeper.start(self._make_ready)
            if self.context.stop.is_set():
                return
            await self.offers.start()
            await self._train_whatever_dies()
        except Stopping as reason:
            self.context.log.info("stopped", reason=str(reason))
        except tuple(ERRORS.values()) as error:
            await self.outbox.ended()
            of_batch = not isinstance(error, CheckpointError | OtherModel | NonFiniteWeights | TeacherFault)
            words = self.fold.advice(error, self.step + 1, self.context.files.root if of_batch else None)
            raise ActorFault(words) from error
        finally:
            await self.offers.close()
            await self.group.close()
        await self.turns.give_back(self.outbox)
        await self.keeper.close()

    async def _train_whatever_dies(self) -> None:
        """Train to the end; replace a trainer group that is lost."""
        restarts, lost = RestartPolicy(self.config.supervision), None
        while True:
            try:
                if lost is not None:
                    await self._begin_again(lost, restarts)
                return await self._train_to_end()
            except GroupLost as error:
                lost = error

    async def _train_to_end(self) -> None:
        await self._resume()
        while self.step < self.config.learner.steps and not self.context.stop.is_set():
            if self.fold.rollback is not None:
                await self._settled()
                await self.keeper.append_until_stored([restored := self.fold.roll_back()])
                raise GroupLost(f"alert {restored.alert} takes training back to step {restored.step}")
            await self._train_next(publish=True)
            if self.group.can_grow and self._begun == self.step:
                await self._settled()
                raise GroupLost("missing GPUs are back, and a checkpoint is saved")
        finished = self.fold.state.finished
        if self.step >= self.config.learner.steps and (finished is None or finished < self.step):
            await self._finish()
        await self._settled()

    async def _begin_again(self, error: GroupLost, restarts: RestartPolicy) -> None:
        """Restart the trainer group, and bring it to the end of the log.

        Raises:
            ActorDown: the group was lost again and again.
        """
        restarts.add()
        if restarts.should_give_up:
            raise ActorDown(f"the trainer group was lost {restarts.count} times in a row; the last reason: {error}")
        await self.outbox.ended()  # nothing of this group is appended from here on
        with contextlib.suppress(GroupLost):
            self.outbox.check()
        await self.group.close()
        await self.context.started(f"its trainer group was lost: {error}")
        await restarts.pause()
        self._begin()
        await self._make_ready()

    async def _make_ready(self) -> None:
        """Load the model and the newest checkpoint before this process claims the log; a spare has neither."""
        self.context.doing(Activity("loading"))
        await self.turns.take()
        await self.group.open()
        for saved in reversed(self.fold.state.checkpoints):
            try:
                found = await self._load(Path(saved.path))
            except CheckpointError as error:
                self.context.log.warning("checkpoint unusable", path=saved.path, reason=str(error))
                self._lost.append(CheckpointLost(saved.lineage, saved.step, saved.path, str(error)))
                continue
            self.step, self.batch_sequence = found.step, found.batch_sequence
            self.context.log.info("checkpoint loaded", step=self.step, path=saved.path)
            break
        else:
            packed = Part(BATCHES, subjects=[BATCH_PACKED.pattern(self.context.bus.run)])
            await read_merged(self.context.bus, [packed], self.fold.recall, self.context.refuse)
            if self.config.start.checkpoint:
                await self._load(self.context.files.base / self.config.start.checkpoint)

    async def _load(self, checkpoint: Path) -> Checkpoint:
        found = await asyncio.to_thread(read_checkpoint, checkpoint)
        try:
            await self.turns.take()
            await self.group.ask(Trainer.load, checkpoint)
        except CheckpointError:
            await self.group.close()  # a part of it may be in the weights
            self.group = self._new_group()
            await self.turns.take()
            await self.group.open()
            raise
        return found

    async def _train_again(self) -> bool:
        """Train the steps after the checkpoint again.

        It saves on the way: a learner that is killed more often than it can retrain would never advance otherwise.
        """
        differs, saved_s = await self._differs(), time.monotonic()
        self.lineage = self.fold.state.lineage + differs
        while self.step < self.fold.state.trained and not self.context.stop.is_set():
            await self._train_next(publish=False)
            differs |= await self._differs()
            self.lineage = self.fold.state.lineage + differs
            is_due = self._saving_is_due() or time.monotonic() - saved_s >= RESAVE_S
            if is_due and self.step < self.fold.state.trained:
                await self._save(await self._digest())
                saved_s = time.monotonic()
        if differs:
            self.context.log.warning("weights differ from those published; a new lineage begins", lineage=self.lineage)
        return differs

    async def _resume(self) -> None:
        """Continue where the log ends, and publish only what differs."""
        self.outbox.put(*self._lost)
        await self.outbox.stored()
        differs = await self._train_again()
        if self._publishes(self.step) and (differs or self.step not in self.fold.state.published):
            await self._publish()
        self.outbox.put(*self._evaluations.due(self.step))
        if self._saving_is_due():  # the learner may have died between a step and its checkpoint
            await self._save()
        self._recent.figures = self.fold.state.figures
        self._resumed = True

    async def _digest(self) -> str:
        await self._written()
        await self.offers.withdraw()
        await self._copy_weights()
        return await copied_digest(self.group)

    async def _differs(self) -> bool:
        """Return whether these weights were published with other bits."""
        published = self.fold.state.published.get(self.step)
        return published is not None and published != await self._digest()

    async def _train_next(self, *, publish: bool) -> None:
        """Fetch and train one batch. Its messages and checkpoints are written while the next steps run."""
        packed = await self._batch(self.step + 1)
        if packed is None or (sequence := self.fold.sequence(packed.step)) is None:
            return
        if skips := self.fold.skips(packed.step):
            self.context.log.warning("batch skipped", step=packed.step)
            result = StepResult(skipped_stats(packed), {})
        elif not await self._times.of("fetch_s", gathered(self.context, self.group, packed.step, sequence)):
            return
        else:
            result = await self._trained_on(packed, sequence)
            assert_step(self.context, packed.step, result)
        self.step, self.batch_sequence = packed.step, sequence
        self._moved = packed.step if packed.objective.moves_policy and not skips else self._moved
        if not publish:
            return
        crash_point("learner.stepped")
        self.outbox.put(step_record(packed, result, sequence, lineage=self.lineage, skipped=skips))
        if self._publishes(self.step):
            await self._times.of("publish_s", self._publish())
        self.context.vitals.update(step=self.step, reward=result.stats.reward_mean)
        self.outbox.put(*self._evaluations.due(self.step))
        if self._saving_is_due():
            await self._times.of("save_s", self._save())

    async def _trained_on(self, packed: BatchPacked, sequence: int) -> StepResult:
        """Train one batch; if the next batch is packed during the step, fetch its tokens."""
        began = time.monotonic()
        self.context.doing(Activity("training", packed.step))
        fetching = self.outbox.begin(fetch_once_packed(self.keeper, self.fold, self.group, packed.step + 1))
        range_of = self._recent.usual(packed.stage) if self._resumed else None  # else it was judged before
        try:
            await self.turns.take()
            result = await self._profiles.around(packed.step, lambda path: step(self.group, sequence, range_of, path))
        finally:
            fetching.cancel()
        self._recent.add(packed.stage, result.metrics)
        return result._replace(metrics=result.metrics | self._times.take(packed, time.monotonic() - began))

    def _publishes(self, step: int) -> bool:
        learner, start = self.config.learner, self.config.start.step
        return step >= 0 and (step % learner.publish_every == 0 or step in (start, learner.steps))

    async def _publish(self, answers: int = 0) -> None:
        """Copy the weights; a background task writes and announces them during the next step.

        Args:
            answers: sequence of the weights.published that an engine refused, for which these are written.
        """
        self._answered = max(self._answered, answers)
        await self._written()
        if self.config.weights.delta != "never":
            await self.outbox.stored()  # the version before is what the next one may be a difference to
        self.context.doing(Activity("publishing", self.step))
        await self.offers.withdraw()
        await self._copy_weights()
        state, why = self.fold.state, self.fold.full_because(self.config.weights, self.lineage)
        version = Version(self.lineage, self.step, "" if why else state.newest, why)
        self._version = self.outbox.begin(self._write_version(version, state.full, answers))
        self.outbox.put(self._version)

    async def _write_version(self, version: Version, full: int, answers: int) -> WeightsPublished:
        moved, before = self._moved, None if answers else self._newest  # later steps may end during the write
        try:
            self._newest = message = await published_by(self.group, version, before)
        except NonFiniteWeights as error:
            await self.keeper.append_until_stored([WeightsRejected(version.lineage, version.number, str(error))])
            raise
        if before and message.is_unchanged and before.version < moved:
            await report_unchanged(self.context, self.keeper, message, before)
        crash_point("weights.renamed")
        self.offers.open(message.key)
        return msgspec.structs.replace(message, answers=answers, full=max(full, 1) if message.base else 0)

    async def _written(self) -> None:
        """Wait until the newest version is in the store: its copies are needed until then."""
        if self._version is not None:
            await self._version

    def _saving_is_due(self) -> bool:
        return self.fold.wants_checkpoint(self.step, self._begun, every=self.config.learner.checkpoint_every)

    async def _save(self, digest: str = "") -> None:
        """Copy the state; the checkpoint is written during the next steps, and counts once it is published."""
        if self._checkpoint is not None:
            await self._checkpoint
        if any(saved.step == self.step and saved.lineage == self.lineage for saved in self.fold.state.checkpoints):
            return
        self.context.doing(Activity("saving", self.step))
        if not (digest or self._publishes(self.step)):  # else the version of this step has it
            digest = await self._digest()
        await self.turns.take()
        await self.group.ask(Publisher.copy_state)
        self._begun = self.step
        checkpoint = Checkpoint(self.lineage, self.step, digest, self.batch_sequence)
        self._checkpoint = self.outbox.begin(self._write_checkpoint(checkpoint))

    async def _write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint once its step is on the log, with the digest of its version if it has one."""
        await self.outbox.stored()
        crash_point("learner.saving")
        digest = checkpoint.digest or self.fold.state.published[checkpoint.step]
        path = await save_checkpoint(self.group, msgspec.structs.replace(checkpoint, digest=digest))
        crash_point("checkpoint.renamed")
        message = CheckpointSaved(checkpoint.lineage, checkpoint.step, digest, str(path), checkpoint.batch_sequence)
        await self.keeper.append_until_stored([message])
        crash_point("checkpoint.published")

    async def _settled(self) -> None:
        """Wait until all trained steps are published, and the checkpoints that were due are saved."""
        await self.outbox.stored()
        if self._checkpoint is not None:
            await self._checkpoint

    async def _finish(self) -> None:
        """Write the last checkpoint and the exported model, and publish that training has finished."""
        await self._save()
        await self._settled()
        await self.offers.withdraw()
        await self._copy_weights(whole=True)
        await export_model(self.group, exported := self.context.files.root / "exported")
        crash_point("learner.exported")
        self.outbox.put(TrainingFinished(self.step, "steps", str(exported)))

    async def _batch(self, step: int) -> BatchPacked | None:
        """A batch, once it is packed; None when the actor shall stop first."""
        offloads = self.config.learner.offload_idle or self.turns.shared
        began, rests = time.monotonic(), offloads
        self.context.doing(Activity("awaiting batch", step))
        while (sequence := self._to_train(step)) is None and not self.context.stop.is_set():
            self._check()
            if self._resumed and self.fold.rollback is not None:
                return None
            if self._resumed and self.fold.wants_checkpoint(self.step, self._begun):
                await self._times.of("save_s", self._save())
                rests = offloads
            if self._resumed and self.fold.unanswered > self._answered:
                await self._publish(answers=self.fold.unanswered)
                self.context.doing(Activity("awaiting batch", step))
                rests = offloads
            if rests:
                await offload(self.context, self.group)
                await self.turns.give_back(self.outbox)
                rests = False  # what comes next brings it back
                continue
            await self.keeper.changes()
        self._check()
        self._times.add("wait_s", waited_s := time.monotonic() - began)
        self.context.count("waited_s", waited_s)
        if sequence is None:
            return None
        return self.fold.at_hand(step) or await read_batch(self.context.bus, sequence)

    def _to_train(self, step: int) -> int | None:
        """Return the sequence of a batch; None before it is packed, and while an alert pauses new steps."""
        return None if self._resumed and self.fold.paused else self.fold.sequence(step)

    def _check(self) -> None:
        """Raise the error that ended the group, or the first error of the outbox."""
        self.group.check()
        self.outbox.check()
