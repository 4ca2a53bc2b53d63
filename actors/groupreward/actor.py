"""The group reward worker: one call of a reward function grades all members of a group."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from actors.runtime.actor import Context
from actors.runtime.delivery import Delivery
from actors.runtime.isolation import WorkFailed
from actors.runtime.worker import WorkerLoop
from asyncrl.bus.publish import BlobMissing, read, read_result
from asyncrl.config.held_out import graded_tasks, held_out_sets
from asyncrl.config.tasks import Task, largest_group
from asyncrl.rewards.graders import GroupGrader, GroupReward
from asyncrl.rewards.score import GradeRequest, RewardFailed, request_of
from asyncrl.rewards.shaping import shaped
from topics.actors import Waiting
from topics.groups import GROUP_GRADED, GroupCompleted, GroupGraded, MemberGrade
from topics.trajectories import (
    TrajectoryFailed,
    TrajectoryGraded,
    TrajectorySubmitted,
    member_fields,
    tokens_sampled,
)
from topics.wire import WireError


async def main(context: Context) -> None:
    """Run a group reward worker until asked to stop."""
    config, graders = context.config, dict[GroupReward, GroupGrader]()
    most = max(largest_group(config), *(held_out.samples for held_out in held_out_sets(config).values()), 1)
    async with AsyncExitStack() as stack:
        for reward in {_reward_of(task) for task in graded_tasks(config).values() if task.reward_scope == "group"}:
            limit_s = config.reward.tournament_limit_s if reward.tournament else config.reward.time_limit_s
            graders[reward] = await GroupGrader.open(
                reward,
                base=context.files.base,
                workers=config.reward.children,
                time_limit_s=limit_s,
                memory_mb=config.reward.memory_mb,
                most=most,
            )
            stack.push_async_callback(graders[reward].close)
        worker = GroupRewardWorker(context, graders)
        await WorkerLoop(context, worker.handle, max(1, config.reward.in_flight // most)).run()


def _reward_of(task: Task) -> GroupReward:
    return GroupReward(task.reward, task.tournament)


class GroupRewardWorker:
    """Grades one group at a time, many at once."""

    def __init__(self, context: Context, graders: dict[GroupReward, GroupGrader]) -> None:
        """
        Args:
            graders: by the reward that they compute.
        """
        self._context = context
        self._rewards = {name: _reward_of(task) for name, task in graded_tasks(context.config).items()}  # by task
        self._graders = graders

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
        return [self._claim(member, grade, delivery.at.deliveries) for member, grade in pairs]

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
        except RewardFailed as error:
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
            WorkFailed: its tokens are gone, as they are once the group has ended.
        """
        try:
            return request_of(await read_result(self._context.bus, member.payload))
        except BlobMissing as error:
            raise WorkFailed("reward", f"{member.trajectory_id}: {error}") from error

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
            versions=member.versions,
            truncated=member.truncated,
            discarded=member.discarded,
            hybrid=member.hybrid,
            lengths=member.lengths,
            turn_rewards=member.turn_rewards,
            **shaped(self._context.config, member.stage, member.tokens, grade.reward, metrics),
        )
