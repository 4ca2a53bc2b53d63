"""The reward worker: grades generated trajectories."""

from __future__ import annotations

import xxhash

from actors.runtime.actor import ActorFault, Context
from actors.runtime.failures import publish_failure
from actors.runtime.poison_guard import PoisonGuard
from actors.runtime.worker import PUBLISHING, Delivery, WorkerLoop
from asyncrl.bus.publish import body_of, publish
from asyncrl.rewards.functions import FunctionError
from asyncrl.rewards.graders import Grader, GradeRequest, GraderError, RewardFailed, open_grader
from topics.table import QUEUES
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
        await WorkerLoop(context, QUEUES["reward"], TrajectoryGenerated, worker.handle, settings.in_flight).run()
    finally:
        await worker.close()


class RewardWorker:
    """Grades one trajectory at a time, many at once."""

    def __init__(self, context: Context, grader: Grader | None) -> None:
        self._context = context
        self._grader = grader
        self._suspects = PoisonGuard(context)

    async def handle(self, generated: TrajectoryGenerated, delivery: Delivery[TrajectoryGenerated]) -> bool:
        """Publish a grade, or the claim that there can be none."""
        if self._suspects.doubts(delivery.at.deliveries - 1):
            poison = await self._suspects.alone(delivery)
            return bool(poison) and await self._fail(generated, delivery, "poison", poison)
        return await self._grade(generated, delivery)

    async def close(self) -> None:
        """End what was started for grading."""
        await self._suspects.close()
        if self._grader is not None:
            await self._grader.close()

    async def _grade(self, generated: TrajectoryGenerated, delivery: Delivery[TrajectoryGenerated]) -> bool:
        if generated.stage == "warmup":
            await self._publish_grade(generated, delivery, 0.0, {})
            return True
        outcome = generated.outcome or Outcome()
        if outcome.reward is not None:
            await self._publish_grade(generated, delivery, outcome.reward, outcome.metrics)
            return True
        if self._grader is None:
            return await self._fail(generated, delivery, "reward", _NO_REWARD)
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
            with delivery.waiting("its reward"):  # in the queue of the grader, then for its time limit at most
                result = await self._grader.grade(request)
        except RewardFailed as error:
            return await self._fail(generated, delivery, "reward", str(error))
        await self._publish_grade(generated, delivery, result.reward, outcome.metrics | result.metrics)
        return True

    async def _fail(
        self,
        generated: TrajectoryGenerated,
        delivery: Delivery[TrajectoryGenerated],
        reason: FailureReason,
        detail: str,
    ) -> bool:
        tokens = tokens_sampled(generated)
        return await publish_failure(self._context, generated, delivery, reason, detail, tokens)

    async def _publish_grade(
        self,
        generated: TrajectoryGenerated,
        delivery: Delivery[TrajectoryGenerated],
        reward: float,
        metrics: dict[str, float],
    ) -> None:
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
        with delivery.waiting(PUBLISHING):
            await publish(self._context.bus, message)
        self._context.count("graded")
