"""The figures and references that `batch.packed` carries about its trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import TypeVar

from actors.buffer.state import Group
from asyncrl.algorithms.filters import QUALITY
from asyncrl.algorithms.pass_at import pass_at
from asyncrl.config.held_out import HeldOut
from topics.batches import BatchMember
from topics.evals import EvalScored
from topics.prompts import ONLY_TASK
from topics.trajectories import TrajectoryGraded

_REASON = 1024  # characters
_METRICS = 64  # names of metrics in the figures of a batch


def references(members: Sequence[TrajectoryGraded]) -> list[BatchMember]:
    """Graded members by reference."""
    return [
        BatchMember(
            member.trajectory_id,
            member.attempt,
            member.payload,
            member.reward,
            member.tokens,
            member.truncated,
            {name: member.metrics[name] for name in QUALITY if name in member.metrics},
            member.unshaped,
            member.lengths,
            member.turn_rewards,
        )
        for member in members
    ]


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
    """Why answers of an evaluation have no grade; "" where all have one."""
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
        no answer), `truncated_share` and (unless it is 0) `hybrid_share` of the trajectories, `issue_to_grade_s_mean`
        and `issue_to_grade_s_max`, `flat_groups_share` of the groups of several whose rewards are all equal,
        `task/NAME/reward_mean` and `task/NAME/trajectories` of each task where a run has several, and `reward/NAME`:
        the mean of each metric that rewards or rollout functions gave, over the trajectories for which they did; of
        more than `_METRICS` names those that most trajectories have.
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
