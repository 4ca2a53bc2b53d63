"""Decisions about open groups, pure: when one is graded as a whole, its ends, and what a batch records of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TypeVar

import msgspec

from actors.buffer.state import BufferState, Group, Plan
from asyncrl.algorithms.filters import QUALITY
from asyncrl.algorithms.pass_at import pass_at
from asyncrl.config.held_out import HeldOut, set_of
from topics.batches import BatchGroup, BatchMember
from topics.evals import EvalScored
from topics.groups import GroupCompleted, GroupDropped
from topics.ids import WARMUP, Stage, member_of, prompt_name, prompt_of, stage_of, trajectory_name
from topics.prompts import ONLY_TASK
from topics.trajectories import DropReason, TrajectoryDropped, TrajectoryFailed, TrajectoryGraded, tokens_sampled
from topics.wire import Message


def gather(state: BufferState, plan: Plan, group: Group, member: int) -> None:
    """Note that the members graded with this one are to be graded, once all of them have ended.

    In an evaluation those are the answers to its row, else the whole group. Note its surplus, too.
    """
    note_surplus(state, group)
    if not group.submitted or group.prompt_id not in state.issued[stage_of(group.prompt_id)]:
        return
    first, behind, group_id = 0, group.size, group.prompt_id
    if group.stage == "eval":
        samples = set_of(plan.held_out, group.task).samples
        first = member - member % samples
        behind, group_id = first + samples, trajectory_name(group.prompt_id, first)
    if group_id in group.completed:
        return
    members = range(first, behind)
    waiting = [one for one in members if group.waits_for_group(one)]
    if waiting and all(map(group.is_known, members)):
        state.gathered[group_id] = waiting
    else:
        state.gathered.pop(group_id, None)


def surplus(group: Group) -> list[int]:
    """Return the members to end, once as many as are wanted are graded or wait for the reward of their group."""
    graded = sorted((group.graded_ns[member.member], member.member) for member in group.live())
    done = [*(member for _, member in graded), *(one.member for one in group.ungraded())]
    if group.keep or not group.wanted or len(done) < group.wanted:
        return []
    kept = {*done[: group.wanted], *group.failed, *group.dropped}
    return [member for member in range(group.size) if member not in kept]


def note_surplus(state: BufferState, group: Group) -> None:
    """Note whether members of a group are to end because it has enough."""
    if surplus(group):
        state.surplus[group.prompt_id] = None
    else:
        state.surplus.pop(group.prompt_id, None)


def end_surplus(state: BufferState) -> list[Message]:
    """The ends of these members."""
    found = [state.groups[prompt_id] for prompt_id in state.surplus]
    return [drop(group, member, "surplus") for group in found for member in surplus(group)]


def completed(state: BufferState) -> list[Message]:
    """Groups to be graded, whose members have all ended."""
    return [
        GroupCompleted(group_id, [_group(state, group_id).submitted[member] for member in members])
        for group_id, members in state.gathered.items()
    ]


def deadline_s(state: BufferState, plan: Plan, stage: Stage, begun_ns: int) -> float:
    """The deadline of what began at a moment of the server's clock; while the run rested, it came no nearer."""
    return max(begun_ns, state.opened_ns) / 1e9 + plan.deadline_s[stage]


def grading_deadlines(state: BufferState, plan: Plan) -> dict[str, float]:
    """Deadlines of groups that are being graded: as long after that began as others are after their issue."""
    return {
        group_id: deadline_s(state, plan, stage_of(group_id), begun_ns)
        for group_id, begun_ns in state.grading.items()
        if _waiting(state, group_id)
    }


def expired_grading(state: BufferState, plan: Plan, now_s: float) -> list[Message]:
    """The ends of members without a grade in time."""
    decisions: list[Message] = []
    for group_id, end_s in grading_deadlines(state, plan).items():
        group = _group(state, group_id)
        if end_s > now_s:
            continue
        if len(group.live()) < group.least:
            decisions.append(drop_group(group, "deadline"))
        else:
            decisions += [drop(group, member, "deadline") for member in _waiting(state, group_id)]
    return decisions


def _group(state: BufferState, group_id: str) -> Group:
    return state.groups[prompt_of(group_id)]


def _waiting(state: BufferState, group_id: str) -> list[int]:
    """The members that one call was asked for and that have no grade yet."""
    group = _group(state, group_id)
    return [member for member in group.completed[group_id] if group.waits_for_group(member)]


def drop(
    group: Group, member: int, reason: DropReason, *, lag: int = 0, again: bool = False, detail: str = ""
) -> TrajectoryDropped:
    """The end of one member; with `again`, only of this attempt, because the member is issued again."""
    graded = group.graded.get(member)
    name = trajectory_name(group.prompt_id, member)
    failed = group.failed.get(member)
    claim = graded or failed or group.submitted.get(member)
    return TrajectoryDropped(
        trajectory_id=name,
        attempt=claim.attempt if claim else group.attempts.get(member, 0),
        reason=reason,
        tokens=claim.tokens if isinstance(claim, TrajectoryFailed) else tokens_sampled(claim) if claim else 0,
        lag=lag,
        again=again,
        detail=detail,
        task=group.task_of(member),
    )


def drop_group(group: Group, reason: str) -> GroupDropped:
    """The end of all members that have no end yet."""
    failed = sum(claim.tokens for member, claim in group.failed.items() if member not in group.dropped)
    tokens = tokens_sampled(*group.live(), *group.ungraded()) + failed
    return GroupDropped(group.prompt_id, reason, group.size - len(group.dropped), tokens, task=group.task)


def drop_filtered(group: Group, reason: str) -> GroupDropped:
    """The end of a complete group that a filter names, with the rewards of its members."""
    dropped = drop_group(group, reason)
    dropped.rewards = [member.score for member in group.live()]
    return dropped


def dropped_too_many(state: BufferState, plan: Plan) -> str:
    """Return why a run whose groups are dropped ends; empty while fewer than its bound were."""
    stage: Stage = "warmup" if state.packed < 0 else "rl"
    count, takes = sum(state.dropped.values()), plan.batch_groups[stage]
    if not plan.most_dropped or count < plan.most_dropped * takes:
        return ""
    reasons = ", ".join(f"{number:,} for {reason}" for reason, number in state.dropped.items())
    return (
        f"{count:,} groups in a row were dropped ({reasons}); buffer.max_dropped_groups allows "
        f"{plan.most_dropped:,} for each of the {takes:,} groups of a batch. Change the filter or the task, then "
        "resume with `asyncrl up --resume RUN --set KEY=VALUE`, such as learner.filters or buffer.max_dropped_groups"
    )


def seconds_to_grade(state: BufferState, group: Group) -> list[float]:
    """Seconds from the issue of a group, or from the last resumption of the run before the grade, to the grade of each
    member that a batch is to take."""
    begun = (state.issued[group.stage].get(group.prompt_id, 0), state.opened_ns)
    grades = [group.graded_ns[member.member] for member in group.to_train()]
    return [(at - max((ns for ns in begun if 0 < ns <= at), default=at)) / 1e9 for at in grades]


def erase(state: BufferState, secrets: list[str]) -> None:
    """Note that data keys were erased."""
    state.purged.update(secrets)
    for group in state.groups.values():
        purge_if_gone(state, group)


def purge_if_gone(state: BufferState, group: Group) -> None:
    """Note that a group is to end, where a data key of it was erased."""
    if not state.purged.isdisjoint(group.secrets.split(",")):
        state.purging[group.prompt_id] = None


def ended(state: BufferState) -> list[Message]:
    """The ends of these groups."""
    return [drop_group(state.groups[prompt_id], "purged") for prompt_id in state.purging]


def in_data_order(state: BufferState, count: int) -> list[str]:
    """Return the next groups of the warm-up, in the order of the data: a warm-up is the same every time."""
    chosen: list[str] = []
    number = state.closed.least_missing(WARMUP)
    while len(chosen) < count:
        name = prompt_name(WARMUP, number)
        if name in state.ready["warmup"]:
            chosen.append(name)
        elif name not in state.closed:
            break
        number += 1
    return chosen


CROWDED = "tenant"
"""Drop reason of a turn whose tenant already has its share of the batch, if no other group can fill the batch."""


def crowded(ready: Sequence[Group], most: int) -> list[Group]:
    """Return the groups that go beyond their tenants' share of the next batch; the oldest of each tenant come first.

    Args:
        ready: complete groups, in their order.
        most: turns of one tenant in a batch.
    """
    counts = Counter[str]()
    found = []
    for group in ready:
        if group.tenant:
            counts[group.tenant] += 1
            if counts[group.tenant] > most:
                found.append(group)
    return found


def make_room(over: Sequence[Group], missing: int, under_way: Iterable[str]) -> list[Message]:
    """Return ends for turns that hold the credit of other tenants; empty while a running group may fill the batch.

    Args:
        over: groups beyond their tenants' share.
        missing: groups that the batch needs in addition to those that it may have.
        under_way: groups of the stage that are not ready.
    """
    if any(True for _ in under_way):
        return []
    return [drop_group(group, CROWDED) for group in over[-missing:]]


_REASON = 1024  # characters
_METRICS = 64  # names of metrics in the figures of a batch


def references(members: Sequence[TrajectoryGraded], kept: Iterable[str] = ()) -> list[BatchMember]:
    """Graded members by reference, with the metrics of filters and the `kept` ones."""
    names = dict.fromkeys((*QUALITY, *kept))
    return [
        BatchMember(
            member.trajectory_id,
            member.attempt,
            member.payload,
            member.reward,
            member.tokens,
            member.truncated,
            {name: member.metrics[name] for name in names if name in member.metrics},
            member.unshaped,
            member.lengths,
            member.turn_rewards,
        )
        for member in members
    ]


def in_batch(group: Group, wanted: Mapping[int, float], kept: Iterable[str] = ()) -> BatchGroup:
    """A group as its batch names it.

    Args:
        wanted: rewards of live turns by their users, who overrule a judge, by member.
        kept: metrics of its members that the objective reads.
    """
    members = references(group.to_train(), kept)
    for place, member in enumerate(members):
        if (reward := wanted.get(member_of(member.trajectory_id))) is not None:
            members[place] = msgspec.structs.replace(member, reward=reward, overruled=True)
    open_now = [member for member in range(group.size) if member not in group.graded.keys() | group.dropped]
    return BatchGroup(
        group.prompt_id,
        members,
        group.task,
        group.temperature,
        group.estimator,
        before=[*group.taken.values()],
        further=open_now if group.keep else [],
    )


def eval_scored(group: Group, held_out: HeldOut, *, seconds: float) -> EvalScored:
    """The result of an evaluation whose every member has a grade or an end."""
    samples, graded = held_out.samples, group.live()
    versions: Counter[int] = Counter()
    for member in graded:
        versions.update({count.version: count.tokens for count in member.versions})
    by_task = {} if held_out.name else _accuracy_by_task(group)
    return EvalScored(
        eval_id=group.prompt_id,
        version=group.min_version,
        versions=dict(versions),
        accuracy=sum(member.reward for member in graded) / group.size,
        prompts=group.size // samples,
        failed=group.size - len(graded),
        seconds=round(seconds, 3),
        members=references(graded),
        metrics=_metrics(graded) | by_task | _pass_at(group, held_out),
        dataset=held_out.name,
        samples=samples,
        reason=_missing(group),
    )


def _missing(group: Group) -> str:
    """Return why answers of an evaluation have no grade; "" where all have one."""
    missing = group.size - len(group.live())
    if not missing:
        return ""
    words = f"{missing} of {group.size} answers have no grade: "
    if not group.failed:
        return f"{words}they were open at eval.deadline_s"
    last = group.failed[max(group.failed)]
    return f"{words}{len(group.failed)} failed, the last one: {last.reason}: {last.detail}"[:_REASON]


def _pass_at(group: Group, held_out: HeldOut) -> dict[str, float]:
    """`pass@k` for each chosen k: the mean over all prompts; an answer without a grade is not correct."""
    samples = held_out.samples
    correct = [0] * (group.size // samples)
    for member in group.live():
        correct[member.member // samples] += member.reward >= held_out.pass_reward
    return {f"pass@{k}": round(fmean(pass_at(samples, count, k) for count in correct), 6) for k in held_out.pass_at}


def batch_figures(groups: Sequence[Sequence[TrajectoryGraded]], seconds: Sequence[float]) -> dict[str, float]:
    """Summarise the graded members of a batch.

    Args:
        groups: of each prompt, at least one member.
        seconds: from issue to grade, of each trajectory.

    Returns:
        `response_tokens_mean` and `response_tokens_max` (trainable tokens of a trajectory), `discarded_tokens` (part of
        no answer), `truncated_share` and (unless it is 0) `hybrid_share` of the trajectories, `accept_length` (tokens
        of a pass, if any engine drafts), `issue_to_grade_s_mean` and `issue_to_grade_s_max`, `flat_groups_share` (of
        the groups of several members, those whose rewards are all equal), `task/NAME/reward_mean` and
        `task/NAME/trajectories` of each task if a run has several, and `reward/NAME`: the mean of each metric that
        rewards or rollout functions gave, over the trajectories for which they did; of more than `_METRICS` names those
        that most trajectories have.
    """
    members = [member for group in groups for member in group]
    lengths = [member.tokens for member in members]
    several = [group for group in groups if len(group) > 1]
    figures = {
        "response_tokens_mean": fmean(lengths),
        "response_tokens_max": float(max(lengths)),
        "discarded_tokens": float(sum(member.discarded for member in members)),
        "truncated_share": fmean(member.truncated for member in members),
        "issue_to_grade_s_mean": fmean(seconds),
        "issue_to_grade_s_max": max(seconds),
    }
    if passes := sum(member.passes for member in members):
        figures["accept_length"] = sum(member.verified for member in members) / passes
    if hybrid := fmean(member.hybrid for member in members):
        figures["hybrid_share"] = hybrid
    if several:
        figures["flat_groups_share"] = fmean(len({member.reward for member in group}) == 1 for group in several)
    for task, own in _by_task((member.task, member) for member in members).items():
        figures[f"task/{task}/reward_mean"] = fmean(member.reward for member in own)
        figures[f"task/{task}/trajectories"] = float(len(own))
    return {name: round(value, 6) for name, value in figures.items()} | _metrics(members)


Of = TypeVar("Of")


def _by_task(members: Iterable[tuple[str, Of]]) -> dict[str, list[Of]]:
    """The members of each task, where a run has named ones."""
    found: dict[str, list[Of]] = {}
    for task, member in members:
        if task != ONLY_TASK:
            found.setdefault(task, []).append(member)
    return found


def _accuracy_by_task(group: Group) -> dict[str, float]:
    """`task/NAME/accuracy` of an evaluation: the mean reward of all its prompts of a task."""
    rewards = {member.member: member.reward for member in group.live()}
    by_task = _by_task((group.task_of(member), rewards.get(member, 0.0)) for member in range(group.size))
    return {f"task/{task}/accuracy": round(fmean(own), 6) for task, own in by_task.items()}


def _metrics(members: Sequence[TrajectoryGraded]) -> dict[str, float]:
    """`reward/NAME`: the mean of each metric that the reward gave, over the members for which it did."""
    names = Counter(name for member in members for name in member.metrics)
    return {
        f"reward/{name}": round(fmean(member.metrics[name] for member in members if name in member.metrics), 6)
        for name in sorted(sorted(names, key=lambda name: (-names[name], name))[:_METRICS])
    }
