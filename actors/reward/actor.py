"""The reward workers: one grades trajectories, the other whole groups with one call of a reward function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from typing import Any

import xxhash

from actors.runtime.actor import Context
from actors.runtime.delivery import Delivery
from actors.runtime.isolation import WorkFailed
from actors.runtime.judging_engines import open_generator, tokenizer_of
from actors.runtime.worker import WorkerLoop
from asyncrl.algorithms.filters import QUALITY
from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.publish import body_of, read, read_result
from asyncrl.child_pool.frames import CallFailed
from asyncrl.config.held_out import graded_tasks, held_out_sets
from asyncrl.config.pools import version_of
from asyncrl.config.settings import Config
from asyncrl.config.staged import all_filters
from asyncrl.config.tasks import Task, largest_group
from asyncrl.config.worker_pools import pool_of_task
from asyncrl.judges.engine import EngineAsk
from asyncrl.rewards.graders import Grader, GradeResult, GroupGrader, GroupReward, open_grader
from asyncrl.rewards.kinds import is_judged
from asyncrl.rewards.quality import quality
from asyncrl.rewards.rubric_graders import RubricGroupGrader, open_rubric
from asyncrl.rewards.rubrics import Rubric
from asyncrl.rewards.score import GradeRequest, request_of
from asyncrl.rewards.shaping import overlong_penalty
from asyncrl.sinks.kinds import traced_share
from asyncrl.tracing import GRADE, traced
from topics.actors import Waiting
from topics.groups import GROUP_GRADED, GroupCompleted, GroupGraded, MemberGrade
from topics.ids import Stage
from topics.roles import pool_of
from topics.trajectories import (
    Outcome,
    Reference,
    TrajectoryFailed,
    TrajectoryGenerated,
    TrajectoryGraded,
    TrajectorySubmitted,
    member_fields,
    tokens_sampled,
)
from topics.wire import WireError

_NO_REWARD = "the rollout function gave no reward (context.outcome(reward)), and its task names no reward function"


async def main(context: Context) -> None:
    """Run a worker of either role until asked to stop."""
    async with AsyncExitStack() as stack:
        open_worker = _open_for_groups if context.role == "groupreward" else _open_for_trajectories
        handle, at_once = await open_worker(context, stack)
        await WorkerLoop(context, handle, at_once).run()


async def _open_for_trajectories(context: Context, stack: AsyncExitStack) -> tuple[Callable[..., Any], int]:
    settings, graders = context.config.reward, dict[str, Grader]()
    ask = await _judge(context, stack)
    pool, known = pool_of(context.actor_id), graded_tasks(context.config).values()
    tasks = [task for task in known if pool_of_task(context.config, "reward", task.name) == pool]
    tasks = [task for task in tasks if task.reward_scope == "trajectory"]
    for function in {task.reward for task in tasks if task.reward}:
        if is_judged(function):
            graders[function] = await open_rubric(
                function, base=context.files.base, time_limit_s=settings.time_limit_s, ask=ask
            )
            stack.push_async_callback(graders[function].close)
            continue
        graders[function] = await open_grader(
            function,
            base=context.files.base,
            workers=settings.children,
            time_limit_s=settings.time_limit_s,
            memory_mb=settings.memory_mb,
            batch=settings.batch,
        )
        stack.push_async_callback(graders[function].close)
    return RewardWorker(context, graders).handle, settings.in_flight


async def _open_for_groups(context: Context, stack: AsyncExitStack) -> tuple[Callable[..., Any], int]:
    config, graders = context.config, dict[GroupReward, GroupGrader | RubricGroupGrader]()
    ask = await _judge(context, stack)
    most = max(largest_group(config), *(held_out.samples for held_out in held_out_sets(config).values()), 1)
    for reward in {_reward_of(task) for task in graded_tasks(config).values() if task.reward_scope == "group"}:
        limit_s = config.reward.tournament_limit_s if reward.tournament else config.reward.time_limit_s
        if is_judged(reward.function):
            rubric = Rubric.read(context.files.base / reward.function, ask)
            graders[reward] = RubricGroupGrader(rubric, reward.tournament, limit_s)
            stack.push_async_callback(graders[reward].close)
            continue
        graders[reward] = await GroupGrader.open(
            reward,
            base=context.files.base,
            workers=config.reward.children,
            time_limit_s=limit_s,
            memory_mb=config.reward.memory_mb,
            most=most,
        )
        stack.push_async_callback(graders[reward].close)
    return GroupRewardWorker(context, graders).handle, max(1, config.reward.in_flight // most)


async def _judge(context: Context, stack: AsyncExitStack) -> EngineAsk | None:
    """Return the judge of rubrics where it is a group of engines of the run."""
    config = context.config
    if not config.reward.judge_engines:
        return None
    tokenizer = tokenizer_of(context, "rubrics")
    return EngineAsk(
        await open_generator(context, tokenizer, stack, purpose="rubrics"),
        tokenizer,
        deadline_s=config.reward.time_limit_s,
        temperature=0.0,
        most_tokens=config.reward.judge_tokens,
        version=version_of(config, "rubrics"),
    )


class RewardWorker:
    """Grades one trajectory at a time, many at once."""

    def __init__(self, context: Context, graders: dict[str, Grader]) -> None:
        self._context = context
        self._tasks = graded_tasks(context.config)
        self._graders = graders  # by the reward function that they call
        self._traced_share = traced_share(context.config.metrics)
        self._measured = set(all_filters(context.config)) & set(QUALITY)
        # Evaluations use at most half of a grader, so that training grades never wait for all evaluation grades.
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
            grade = _shaped(self._context.config, generated.stage, tokens, graded.reward, metrics)
        if generated.stage == "rl":
            grade["metrics"] = quality(generated, self._measured - grade["metrics"].keys()) | grade["metrics"]
        body = await body_of(self._context.bus, delivery.record)
        kind = TrajectoryGraded if "reward" in grade else TrajectorySubmitted
        message: TrajectoryGraded | TrajectorySubmitted = kind(
            **member_fields(generated, delivery.at.num_delivered),
            payload=Reference(delivery.record.sequence, xxhash.xxh3_64_hexdigest(body), len(body)),
            **_result_fields(generated),
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
        try:
            with (
                traced(self._context.bus.run, generated.trajectory_id, GRADE, self._traced_share),
                delivery.waiting(Waiting("reward")),  # in the queue of the grader, then for its time limit at most
            ):
                async with self._held_out[function] if generated.stage == "eval" else nullcontext():
                    return await self._graders[function].grade(request_of(generated))
        except CallFailed as error:
            late = self._context.config.reward.timeout_reward
            if late is None or error.reason != "time_limit" or delivery.lapsed:
                raise WorkFailed("reward", str(error)) from error
            return GradeResult(late, {"reward_timeout": 1.0})


def _result_fields(of: TrajectoryGenerated | TrajectorySubmitted) -> dict[str, Any]:
    """Return what a grade repeats of its result, or of the message that was gathered for it."""
    names = ("versions", "truncated", "discarded", "verified", "passes", "hybrid")
    return {name: getattr(of, name) for name in names}


def _reward_of(task: Task) -> GroupReward:
    return GroupReward(task.reward, task.tournament)


class GroupRewardWorker:
    """Grades one group at a time, many at once."""

    def __init__(self, context: Context, graders: dict[GroupReward, GroupGrader | RubricGroupGrader]) -> None:
        self._context = context
        self._rewards = {name: _reward_of(task) for name, task in graded_tasks(context.config).items()}  # by task
        self._graders = graders  # by the reward that they compute
        self._traced_share = traced_share(context.config.metrics)

    async def handle(
        self, completed: GroupCompleted, delivery: Delivery[GroupCompleted]
    ) -> list[TrajectoryGraded | TrajectoryFailed]:
        """Return a grade, or a failure, of each member.

        The scores of the group are stored as one message before: a worker that is killed between the grades of two
        members leaves them to the next one, which calls nothing.

        Raises:
            WorkFailed: there can be none.
            Fenced: another worker stored the scores of the group first.
        """
        newest = await delivery.newest(GROUP_GRADED)
        if newest is not None:
            graded = await read(self._context.bus, GroupGraded, newest)
        else:
            graded = GroupGraded(completed.group_id, await self._grades(completed, delivery))
            await delivery.publish(graded)
        if len(graded.grades) != len(completed.members):
            found = f"{len(graded.grades)} scores for {len(completed.members)} members"
            raise WireError(f"group.graded of {completed.group_id} has {found}")
        pairs = zip(completed.members, graded.grades, strict=True)
        return [self._claim(member, grade, delivery.at.num_delivered) for member, grade in pairs]

    async def _grades(self, completed: GroupCompleted, delivery: Delivery[GroupCompleted]) -> list[MemberGrade]:
        """Call the function with all members."""
        first = completed.members[0]
        reward = self._rewards.get(first.task)
        grader = self._graders.get(reward) if reward is not None else None
        if grader is None:
            raise WireError(f"{completed.group_id} is of task {first.task!r}, whose reward is of no whole group")
        requests = await asyncio.gather(*map(self._request, completed.members))
        try:
            with delivery.waiting(Waiting("reward")):  # in the queue of the grader, then for its time limit at most
                scores = await grader.grade(requests)
        except CallFailed as error:
            if delivery.lapsed or error.reason == "closed":
                raise WorkFailed("reward", str(error)) from error
            return [MemberGrade(fault=str(error))] * len(requests)
        return [
            MemberGrade(fault=score) if isinstance(score, str) else MemberGrade(score.reward, score.metrics)
            for score in scores
        ]

    async def _request(self, member: TrajectorySubmitted) -> GradeRequest:
        """Return the arguments of the user's function for one member.

        Raises:
            WorkFailed: its tokens are gone, because the group has ended.
        """
        try:
            result = await read_result(self._context.bus, member.payload)
        except BlobMissing as error:
            raise WorkFailed("reward", f"{member.trajectory_id}: {error}") from error
        with traced(self._context.bus.run, member.trajectory_id, GRADE, self._traced_share):
            return request_of(result)

    def _claim(
        self, member: TrajectorySubmitted, grade: MemberGrade, delivery: int
    ) -> TrajectoryGraded | TrajectoryFailed:
        fields = member_fields(member, delivery)
        if grade.reward is None:
            return TrajectoryFailed(**fields, reason="reward", detail=grade.fault, tokens=tokens_sampled(member))
        metrics = member.metrics | grade.metrics
        return TrajectoryGraded(
            **fields,
            payload=member.payload,
            **_result_fields(member),
            lengths=member.lengths,
            turn_rewards=member.turn_rewards,
            **_shaped(self._context.config, member.stage, member.tokens, grade.reward, metrics),
        )


def _shaped(config: Config, stage: Stage, tokens: int, reward: float, metrics: dict[str, float]) -> dict[str, Any]:
    """The fields `reward`, `metrics` and `unshaped` of a grade: in RL, over-long trajectories are punished.

    Args:
        tokens: of the trajectory, those that are trained.
    """
    overlong = config.reward.overlong
    if stage != "rl" or not overlong.penalty:
        return {"reward": reward, "metrics": metrics, "unshaped": None}
    longest = overlong.longest_tokens or config.rollout.max_new_tokens
    punishment = overlong.penalty * overlong_penalty(tokens, longest=longest, interval=overlong.interval_tokens)
    return {"reward": reward + punishment, "metrics": metrics | {"overlong": punishment}, "unshaped": reward}
