"""The reward worker: grades generated trajectories."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import xxhash

from actors.runtime.actor import ActorFault, Context
from actors.runtime.failures import failure
from actors.runtime.poison_guard import PoisonGuard
from actors.runtime.worker import Delivery, Produced, WorkerLoop
from asyncrl.bus.publish import body_of
from asyncrl.errors import FunctionError
from asyncrl.rewards.graders import Grader, GradeRequest, GraderError, RewardFailed, open_grader
from topics.actors import Waiting
from topics.trajectories import (
    FailureReason,
    Outcome,
    Reference,
    TrajectoryGenerated,
    TrajectoryGraded,
    member_fields,
    tokens_sampled,
)
from topics.wire import WireError

_NO_REWARD = 'the rollout function gave no reward (context.outcome(reward)), and reward.function = "" names none'


async def main(context: Context) -> None:
    """Run a reward worker until asked to stop."""
    settings, grader = context.config.reward, None
    try:
        if settings.function:
            grader = await open_grader(
                settings.function,
                base=context.files.base,
                workers=settings.children,
                time_limit_s=settings.time_limit_s,
                memory_mb=settings.memory_mb,
            )
    except (GraderError, FunctionError) as error:
        raise ActorFault(str(error)) from error
    worker = RewardWorker(context, grader)
    try:
        await WorkerLoop(context, worker.handle, settings.in_flight).run()
    finally:
        await worker.close()


class RewardWorker:
    """Grades one trajectory at a time, many at once."""

    def __init__(self, context: Context, grader: Grader | None) -> None:
        self._context = context
        self._grader = grader
        self._suspects = PoisonGuard(context)
        # Evaluations take half of the grader at most: a grade of training never queues behind all of theirs.
        at_once = min(grader.at_once, context.config.reward.in_flight) if grader is not None else 1
        self._held_out = asyncio.Semaphore(max(1, at_once // 2))

    async def handle(self, generated: TrajectoryGenerated, delivery: Delivery[TrajectoryGenerated]) -> Produced:
        """Return a grade, or the claim that there can be none."""
        if self._suspects.doubts(delivery.at.deliveries - 1):
            poison = await self._suspects.alone(delivery)
            return self._fail(generated, delivery, "poison", poison) if poison else None
        return await self._grade(generated, delivery)

    async def close(self) -> None:
        """End what was started for grading."""
        await self._suspects.close()
        if self._grader is not None:
            await self._grader.close()

    async def _grade(self, generated: TrajectoryGenerated, delivery: Delivery[TrajectoryGenerated]) -> Produced:
        if generated.stage == "warmup":
            return [await self._graded(generated, delivery, 0.0, {})]
        outcome = generated.outcome or Outcome()
        if outcome.reward is not None:
            return [await self._graded(generated, delivery, outcome.reward, outcome.metrics)]
        if self._grader is None:
            return self._fail(generated, delivery, "reward", _NO_REWARD)
        if not generated.rows:
            raise WireError(f"{generated.trajectory_id} has no row to be graded against")
        row = generated.rows[0]
        request = GradeRequest(
            completion=generated.completion,
            prompt=row.prompt,
            label=row.label,
            metadata=row.metadata,
            trajectory_id=generated.trajectory_id,
        )
        try:
            with delivery.waiting(Waiting("reward")):  # in the queue of the grader, then for its time limit at most
                async with self._held_out if generated.stage == "eval" else nullcontext():
                    result = await self._grader.grade(request)
        except RewardFailed as error:
            return self._fail(generated, delivery, "reward", str(error))
        return [await self._graded(generated, delivery, result.reward, outcome.metrics | result.metrics)]

    def _fail(
        self,
        generated: TrajectoryGenerated,
        delivery: Delivery[TrajectoryGenerated],
        reason: FailureReason,
        detail: str,
    ) -> Produced:
        return failure(self._context, generated, delivery, reason, detail, tokens_sampled(generated))

    async def _graded(
        self,
        generated: TrajectoryGenerated,
        delivery: Delivery[TrajectoryGenerated],
        reward: float,
        metrics: dict[str, float],
    ) -> TrajectoryGraded:
        body = await body_of(self._context.bus, delivery.record)
        return TrajectoryGraded(
            **member_fields(generated, delivery.at.deliveries),
            payload=Reference(delivery.record.sequence, xxhash.xxh3_64_hexdigest(body), len(body)),
            versions=generated.versions,
            reward=reward,
            truncated=generated.truncated,
            metrics=metrics,
            discarded=generated.discarded,
        )
