"""The reward worker: grades generated trajectories."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, nullcontext
from typing import Any

import xxhash

from actors.runtime.actor import Context
from actors.runtime.delivery import Delivery
from actors.runtime.isolation import WorkFailed
from actors.runtime.worker import WorkerLoop
from asyncrl.algorithms.filters import QUALITY
from asyncrl.bus.publish import body_of
from asyncrl.config.held_out import graded_tasks
from asyncrl.config.staged import all_filters
from asyncrl.config.tasks import Task
from asyncrl.rewards.graders import Grader, GradeResult, RewardFailed, open_grader
from asyncrl.rewards.quality import quality
from asyncrl.rewards.score import request_of
from asyncrl.rewards.shaping import shaped
from topics.actors import Waiting
from topics.trajectories import (
    Outcome,
    Reference,
    TrajectoryGenerated,
    TrajectoryGraded,
    TrajectorySubmitted,
    member_fields,
)
from topics.wire import WireError

_NO_REWARD = "the rollout function gave no reward (context.outcome(reward)), and its task names no reward function"


async def main(context: Context) -> None:
    """Run a reward worker until asked to stop."""
    settings, graders = context.config.reward, dict[str, Grader]()
    async with AsyncExitStack() as stack:
        tasks = [task for task in graded_tasks(context.config).values() if task.reward_scope == "trajectory"]
        for function in {task.reward for task in tasks if task.reward}:
            graders[function] = await open_grader(
                function,
                base=context.files.base,
                workers=settings.children,
                time_limit_s=settings.time_limit_s,
                memory_mb=settings.memory_mb,
                batch=settings.batch,
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
        self._tasks = graded_tasks(context.config)
        self._graders = graders
        self._measured = set(all_filters(context.config)) & set(QUALITY)
        # Evaluations take half of a grader at most: a grade of training never queues behind all of theirs.
        most = context.config.reward.in_flight
        self._held_out = {
            function: asyncio.Semaphore(max(1, min(grader.at_once, most) // 2)) for function, grader in graders.items()
        }

    async def handle(
        self, generated: TrajectoryGenerated, delivery: Delivery[TrajectoryGenerated]
    ) -> list[TrajectorySubmitted | TrajectoryGraded]:
        """Return a grade, or what the buffer gathers where its reward needs the whole group.

        Raises:
            WorkFailed: there can be none.
        """
        outcome, grade = generated.outcome or Outcome(), dict[str, Any](metrics={})
        if generated.stage == "warmup":
            grade["reward"] = 0.0
        elif outcome.reward is not None:
            grade |= {"reward": outcome.reward, "metrics": outcome.metrics}
        elif self._task(generated).reward_scope == "group":
            grade["metrics"] = outcome.metrics
        else:
            graded = await self._grade(generated, delivery)
            tokens = sum(count.tokens for count in generated.versions)
            metrics = outcome.metrics | graded.metrics
            grade = shaped(self._context.config, generated.stage, tokens, graded.reward, metrics)
        if generated.stage == "rl":
            grade["metrics"] = quality(generated, self._measured - grade["metrics"].keys()) | grade["metrics"]
        body = await body_of(self._context.bus, delivery.record)
        kind = TrajectoryGraded if "reward" in grade else TrajectorySubmitted
        message: TrajectoryGraded | TrajectorySubmitted = kind(
            **member_fields(generated, delivery.at.deliveries),
            payload=Reference(delivery.record.sequence, xxhash.xxh3_64_hexdigest(body), len(body)),
            versions=generated.versions,
            truncated=generated.truncated,
            discarded=generated.discarded,
            hybrid=generated.hybrid,
            lengths=[len(segment.tokens) for segment in generated.segments],
            turn_rewards=outcome.turn_rewards,
            **grade,
        )
        return [message]

    def _task(self, generated: TrajectoryGenerated) -> Task:
        if generated.task not in self._tasks:
            name = generated.trajectory_id
            raise WireError(f"{name} is of task {generated.task!r}; here are {', '.join(self._tasks)}")
        return self._tasks[generated.task]

    async def _grade(self, generated: TrajectoryGenerated, delivery: Delivery[TrajectoryGenerated]) -> GradeResult:
        function = self._task(generated).reward
        if not function:
            raise WorkFailed("reward", _NO_REWARD)
        request = request_of(generated)
        try:
            with delivery.waiting(Waiting("reward")):  # in the queue of the grader, then for its time limit at most
                async with self._held_out[function] if generated.stage == "eval" else nullcontext():
                    return await self._graders[function].grade(request)
        except RewardFailed as error:
            raise WorkFailed("reward", str(error)) from error
