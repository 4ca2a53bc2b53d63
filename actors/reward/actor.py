"""The reward worker: grades generated trajectories."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, nullcontext

import xxhash

from actors.runtime.actor import Context
from actors.runtime.delivery import Delivery
from actors.runtime.isolation import WorkFailed
from actors.runtime.worker import WorkerLoop
from asyncrl.bus.publish import body_of
from asyncrl.config.tasks import tasks_of
from asyncrl.rewards.graders import Grader, GradeRequest, GradeResult, RewardFailed, open_grader
from topics.actors import Waiting
from topics.trajectories import Outcome, Reference, TrajectoryGenerated, TrajectoryGraded, member_fields
from topics.wire import WireError

_NO_REWARD = "the rollout function gave no reward (context.outcome(reward)), and its task names no reward function"


async def main(context: Context) -> None:
    """Run a reward worker until asked to stop."""
    settings, graders = context.config.reward, dict[str, Grader]()
    async with AsyncExitStack() as stack:
        for function in {task.reward for task in tasks_of(context.config).values() if task.reward}:
            graders[function] = await open_grader(
                function,
                base=context.files.base,
                workers=settings.children,
                time_limit_s=settings.time_limit_s,
                memory_mb=settings.memory_mb,
            )
            stack.push_async_callback(graders[function].close)
        worker = RewardWorker(context, graders)
        await WorkerLoop(context, worker.handle, settings.in_flight).run()


class RewardWorker:
    """Grades one trajectory at a time, many at once."""

    def __init__(self, context: Context, graders: dict[str, Grader]) -> None:
        """
        Args:
            graders: by the reward function that they call.
        """
        self._context = context
        self._functions = {name: task.reward for name, task in tasks_of(context.config).items()}  # by task
        self._graders = graders
        # Evaluations take half of a grader at most: a grade of training never queues behind all of theirs.
        most = context.config.reward.in_flight
        self._held_out = {
            function: asyncio.Semaphore(max(1, min(grader.at_once, most) // 2)) for function, grader in graders.items()
        }

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
            hybrid=generated.hybrid,
        )
        return [message]

    async def _grade(self, generated: TrajectoryGenerated, delivery: Delivery[TrajectoryGenerated]) -> GradeResult:
        function = self._functions.get(generated.task)
        if function is None:
            name = generated.trajectory_id
            raise WireError(f"{name} is of task {generated.task!r}; here are {', '.join(self._functions)}")
        if not function:
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
                async with self._held_out[function] if generated.stage == "eval" else nullcontext():
                    return await self._graders[function].grade(request)
        except RewardFailed as error:
            raise WorkFailed("reward", str(error)) from error
