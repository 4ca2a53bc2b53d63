"""The learner: a deterministic function of the batch log; says steps, versions and checkpoints."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from actors.actor import ActorFault, Context
from actors.keeper import Decision, Input, Keeper
from actors.learner_fold import LearnerFold
from asyncrl.algorithms.batches import BatchRules, GradedTrajectory, TrainRow, build_rows
from asyncrl.algorithms.losses import Correction
from asyncrl.algorithms.schedules import learning_rate_factor
from asyncrl.bus.log import read_message
from asyncrl.bus.talk import body_of
from asyncrl.settings import Cast
from asyncrl.training.checkpoint import Checkpoint, CheckpointError, read_checkpoint, weights_digest, write_checkpoint
from asyncrl.training.protocol import NonFiniteLoss, RowError, StepSpec, Trainer
from asyncrl.training.scripted import ScriptedTrainer
from asyncrl.training.torch_trainer import TorchSettings, TorchTrainer
from asyncrl.weights.files import FileStore
from topics.batches import BATCH_PACKED, BATCH_TRAINED, BatchMember, BatchPacked, BatchTrained
from topics.evals import EVAL_REQUESTED, EvalRequested
from topics.topic import BATCHES, TRAINING, TRAJECTORIES
from topics.trajectories import TrajectoryGenerated
from topics.weights import (
    CHECKPOINT_SAVED,
    TRAINING_FINISHED,
    WEIGHTS_PUBLISHED,
    CheckpointSaved,
    TrainingFinished,
)
from topics.wire import decode

_FETCHES = 64  # payloads asked for at once


async def main(context: Context) -> None:
    """Play the learner until its steps are done."""
    await Learner(context).run()


def open_trainer(cast: Cast, model: Path) -> Trainer:
    """The trainer that the cast names."""
    settings = cast.learner
    if settings.trainer == "scripted":
        return ScriptedTrainer(settings.scripted_step_s)
    return TorchTrainer(
        model,
        TorchSettings(
            device="cuda" if settings.device.startswith("cuda") else "cpu",
            dtype=settings.dtype,
            micro_batch_tokens=settings.micro_batch_tokens,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        ),
    )


def step_spec(cast: Cast, step: int) -> StepSpec:
    """The objective of one step: a pure function of the settings."""
    learner, warmup = cast.learner, cast.warmup
    if step <= 0:
        number = step + warmup.steps
        rate = warmup.lr * learning_rate_factor(number, kind="constant", warmup_steps=warmup.lr_warmup_steps)
        return StepSpec(step=step, loss="sft", learning_rate=rate, grad_clip=learner.max_grad_norm)
    factor = learning_rate_factor(
        step, kind=learner.schedule, warmup_steps=learner.lr_warmup_steps, total_steps=learner.steps
    )
    return StepSpec(
        step=step,
        loss="grpo",
        learning_rate=learner.lr * factor,
        clip=(learner.clip_low, learner.clip_high),
        correction=Correction(
            proximal="current" if learner.correction == "decoupled" else "behaviour",
            mode=learner.correction_mode if learner.correction == "decoupled" else "none",
            cap=learner.correction_cap,
        ),
        grad_clip=learner.max_grad_norm,
    )


class Learner:
    """Trains batch after batch, in the order of the batch log."""

    def __init__(self, context: Context) -> None:
        cast = context.cast
        self.context = context
        self.cast = cast
        self.fold = LearnerFold(1 - cast.warmup.steps)
        self.keeper = Keeper(context, TRAINING, [Input(BATCHES, [BATCH_PACKED])], self.fold)
        self.store = FileStore(context.files.weights)
        self.step = -cast.warmup.steps  # newest step in the weights
        self.line = 0
        self.batch_sequence = 0
        self._fetch: tuple[int, asyncio.Task[list[list[GradedTrajectory]]]] | None = None

    async def run(self) -> None:
        """Resume where the log says, then train to the end."""
        opening = asyncio.create_task(
            asyncio.to_thread(open_trainer, self.cast, self.context.files.model_path(self.cast))
        )
        await self.keeper.start()
        self.trainer = await opening
        if self.context.stop.is_set():
            return
        try:
            await self._resume()
            while self.step < self.cast.learner.steps and not self.context.stop.is_set():
                self._prefetch(self.step + 1)
                if self.fold.batch(self.step + 1) is None:
                    waited = time.monotonic()
                    await self.keeper.changes()
                    self.context.count("waited_s", time.monotonic() - waited)
                else:
                    await self._train_next(publish=True)
            if self.step >= self.cast.learner.steps and not self.fold.finished:
                await self._finish()
        except (NonFiniteLoss, RowError, CheckpointError) as error:
            last = self.fold.checkpoints[-1].path if self.fold.checkpoints else "none yet"
            raise ActorFault(f"batch {self.step + 1}: {error}; the last checkpoint is intact: {last}") from error
        await self.keeper.close()

    async def _resume(self) -> None:
        """Load the newest checkpoint, train again what was trained after it, and publish only what differs."""
        said = self.fold.trained
        self.line = self.fold.line
        for saved in reversed(self.fold.checkpoints):
            try:
                found = await asyncio.to_thread(read_checkpoint, Path(saved.path))
                await asyncio.to_thread(self.trainer.load, Path(saved.path))
            except CheckpointError as error:
                self.context.log.warning("checkpoint unusable", path=saved.path, reason=str(error))
                continue
            self.step, self.batch_sequence = found.step, found.batch_sequence
            self.context.log.info("checkpoint loaded", step=self.step, path=saved.path)
            break
        while self.step < said:
            await self._train_next(publish=False)
        newest = self.fold.published.get(self.step)
        if newest is not None and newest.digest != weights_digest(self.trainer.weights()):
            self.line += 1
            self.context.log.warning("weights differ from those published; a new line begins", line=self.line)
            newest = None
        if newest is None and self._publishes(self.step):
            await self.keeper.insist([await self._publish()])
        await self._ask_for_evaluation()

    async def _train_next(self, *, publish: bool) -> None:
        """One step: fetch, train, say."""
        step = self.step + 1
        packed, sequence = await self._batch(step)
        self._prefetch(step)
        assert self._fetch is not None
        groups = await self._fetch[1]
        self._fetch = None
        self._prefetch(step + 1)
        began = time.monotonic()
        rows, stats = build_rows(groups, self._rules(packed))
        metrics = await asyncio.to_thread(self._update, rows, step)
        metrics["train_s"] = round(time.monotonic() - began, 4)
        self.step, self.batch_sequence = step, sequence
        if not publish:
            return
        lags = stats.lag_histogram if step > 0 else {-1: stats.tokens_trained}
        trained = BatchTrained(
            step=step,
            line=self.line,
            stage=packed.stage,
            metrics=metrics,
            lags=lags,
            masked=stats.tokens_stale,
            rewards=[stats.reward_mean, stats.reward_std],
            trajectories=stats.trajectories,
            batch_sequence=sequence,
        )
        decisions = [Decision(BATCH_TRAINED, trained, id=f"{self.line}:{step}")]
        if self._publishes(step):
            decisions.append(await self._publish())
        await self.keeper.insist(decisions)
        self.context.vitals.update(step=step, reward=stats.reward_mean)
        await self._ask_for_evaluation()
        if step == 0 or step % self.cast.learner.checkpoint_every == 0:
            await self._save()

    def _update(self, rows: Sequence[TrainRow], step: int) -> dict[str, float]:
        return self.trainer.step(rows, step_spec(self.cast, step))

    def _rules(self, packed: BatchPacked) -> BatchRules:
        learner = self.cast.learner
        if packed.stage == "warmup":
            return BatchRules(step=packed.step, advantage="none", aggregation="token")
        return BatchRules(
            step=packed.step,
            min_version=packed.min_version,
            advantage=learner.advantage,
            aggregation=learner.aggregation,
        )

    def _publishes(self, step: int) -> bool:
        return step >= 0 and (step % self.cast.learner.publish_every == 0 or step == self.cast.learner.steps)

    async def _publish(self) -> Decision:
        """Put the weights into the store; the decision says so."""
        message = await asyncio.to_thread(self.store.publish, self.trainer, line=self.line, version=self.step)
        kept = sorted(self.fold.published.values(), key=lambda version: (version.line, version.version))
        keep = [version.location for version in kept[-(self.cast.learner.keep_versions - 1) :]]
        await asyncio.to_thread(self.store.prune, [*keep, message.location])
        return Decision(WEIGHTS_PUBLISHED, message, id=message.key)

    async def _ask_for_evaluation(self) -> None:
        settings = self.cast.eval
        due = self.step in (0, self.cast.learner.steps) or (settings.every and self.step % settings.every == 0)
        name = f"v{self.step:06d}"
        if settings.prompts and due and self.step >= 0 and name not in self.fold.evals:
            message = EvalRequested(name, self.step, settings.prompts, settings.temperature)
            await self.keeper.insist([Decision(EVAL_REQUESTED, message, id=name)])

    async def _save(self) -> None:
        """Write a checkpoint; it counts once it is said."""
        if any(saved.step == self.step and saved.line == self.line for saved in self.fold.checkpoints):
            return
        digest = weights_digest(self.trainer.weights())
        checkpoint = Checkpoint(self.line, self.step, digest, self.batch_sequence)
        path = await asyncio.to_thread(write_checkpoint, self.context.files.checkpoints, checkpoint, self.trainer.save)
        await asyncio.to_thread(read_checkpoint, path)  # what cannot be read back must not count
        message = CheckpointSaved(self.line, self.step, digest, str(path), self.batch_sequence)
        await self.keeper.insist([Decision(CHECKPOINT_SAVED, message, id=path.name)])
        for old in self.fold.checkpoints[: -self.cast.learner.keep_checkpoints]:
            await asyncio.to_thread(shutil.rmtree, old.path, ignore_errors=True)
        self.fold.forget(self.fold.checkpoints[max(0, len(self.fold.checkpoints) - 2)].step)

    async def _finish(self) -> None:
        """The last checkpoint, the model for everybody, and the word that training is over."""
        await self._save()
        exported = self.context.files.root / "exported"
        if not exported.exists():
            await asyncio.to_thread(self.trainer.export, exported)
        message = TrainingFinished(self.step, "steps", str(exported))
        await self.keeper.insist([Decision(TRAINING_FINISHED, message, id="finished")])

    async def _batch(self, step: int) -> tuple[BatchPacked, int]:
        while (found := self.fold.batch(step)) is None:
            await self.keeper.changes()
            if self.context.stop.is_set():
                raise asyncio.CancelledError
        return found

    def _prefetch(self, step: int) -> None:
        """Begin to fetch the payloads of a packed batch."""
        found = self.fold.batch(step)
        if found is not None and (self._fetch is None or self._fetch[0] != step):
            if self._fetch is not None:
                self._fetch[1].cancel()
            self._fetch = (step, asyncio.create_task(self._payloads(found[0])))

    async def _payloads(self, packed: BatchPacked) -> list[list[GradedTrajectory]]:
        """The trajectories of a batch, in the order it names them."""
        limit = asyncio.Semaphore(_FETCHES)
        temperature = self.cast.rollout.temperature if packed.stage == "rl" else 1.0

        async def fetch(member: BatchMember) -> GradedTrajectory:
            async with limit:
                payload = await self._payload(packed.step, member)
            return GradedTrajectory(member.trajectory_id, payload.segments, member.reward, temperature)

        members: list[Any] = [fetch(member) for group in packed.groups for member in group.members]
        fetched = iter(await asyncio.gather(*members))
        return [[next(fetched) for _ in group.members] for group in packed.groups]

    async def _payload(self, step: int, member: BatchMember) -> TrajectoryGenerated:
        record = await read_message(self.context.bus, TRAJECTORIES, member.payload.sequence)
        if record is None:
            raise ActorFault(
                f"batch {step}: the tokens of {member.trajectory_id} (message {member.payload.sequence}) are gone"
            )
        body = await body_of(self.context.bus, record)
        digest = xxhash.xxh3_64_hexdigest(body)
        if digest != member.payload.digest:
            raise ActorFault(
                f"batch {step}: the tokens of {member.trajectory_id} have digest {digest}, "
                f"{member.payload.digest} was graded"
            )
        return decode(TrajectoryGenerated, body)
