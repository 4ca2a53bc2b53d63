"""The reward worker: grades generated trajectories."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import xxhash

from actors.runtime.actor import Context
from actors.runtime.delivery import Delivery
from actors.runtime.isolation import WorkFailed
from actors.runtime.worker import WorkerLoop
from asyncrl.bus.publish import body_of
from asyncrl.rewards.graders import Grader, GradeRequest, GradeResult, RewardFailed, open_grader
from topics.actors import Waiting
from topics.trajectories import Outcome, Reference, TrajectoryGenerated, TrajectoryGraded, member_fields
from topics.wire import WireError

_NO_REWARD = 'the rollout function gave no reward (context.outcome(reward)), and reward.function = "" names none'


async def main(context: Context) -> None:
    """Run a reward worker until asked to stop."""
    settings, grader = context.config.reward, None
    if settings.function:
        grader = await open_grader(
            settings.function,
            base=context.files.base,
            workers=settings.children,
            time_limit_s=settings.time_limit_s,
            memory_mb=settings.memory_mb,
        )
    worker = RewardWorker(context, grader)
    try:
        await WorkerLoop(context, worker.handle, settings.in_flight).run()
    finally:
        if grader is not None:
            await grader.close()


class RewardWorker:
    """Grades one trajectory at a time, many at once."""

    def __init__(self, context: Context, grader: Grader | None) -> None:
        self._context = context
        self._grader = grader
        # Evaluations take half of the grader at most: a grade of training never queues behind all of theirs.
        at_once = min(grader.at_once, context.config.reward.in_flight) if grader is not None else 1
        self._held_out = asyncio.Semaphore(max(1, at_once // 2))

    async def handle(
        self, generated: TrajectoryGenerated, delivery: Delivery[TrajectoryGenerated]
    ) -> list[TrajectoryGraded]:
        """Return a grade.

        Raises:
            WorkFailed: there can be none.
        """
        outcome = generated.outcome or Outcome()
        if generated.stage == "warmup":
            reward, metrics = 0.0, dict[str, float]()
        elif outcome.reward is not None:
            reward, metrics = outcome.reward, outcome.metrics
        else:
            graded = await self._grade(generated, delivery)
            reward, metrics = graded.reward, outcome.metrics | graded.metrics
        body = await body_of(self._context.bus, delivery.record)
        message = TrajectoryGraded(
            **member_fields(generated, delivery.at.deliveries),
            payload=Reference(delivery.record.sequence, xxhash.xxh3_64_hexdigest(body), len(body)),
            versions=generated.versions,
            reward=reward,
            truncated=generated.truncated,
            metrics=metrics,
            discarded=generated.discarded,
        )
        return [message]

    async def _grade(self, generated: TrajectoryGenerated, delivery: Delivery[TrajectoryGenerated]) -> GradeResult:
        if self._grader is None:
            raise WorkFailed("reward", _NO_REWARD)
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
                    return await self._grader.grade(request)
        except RewardFailed as error:
            raise WorkFailed("reward", str(error)) from error
