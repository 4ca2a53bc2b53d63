"""From graded trajectories to the rows of one optimiser step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.advantages import ADVANTAGES, Values, group_advantages
from asyncrl.algorithms.aggregation import token_weights
from asyncrl.algorithms.lag import fresh_mask, lag_histogram
from asyncrl.algorithms.named import AlgorithmError, named
from asyncrl.algorithms.own_columns import with_columns
from asyncrl.algorithms.rows import Routed, TrainRow
from asyncrl.algorithms.turn_returns import of_tokens
from topics.batches import BatchPacked, Objective
from topics.prompts import NO_ESTIMATOR
from topics.trajectories import Segment
from topics.wire import Float32Array, Int32Array, UInt8Array


class GradedTrajectory(NamedTuple):
    """One member of a group, as the batch names it."""

    id: str
    segments: Sequence[Segment]
    reward: float = 0.0
    elsewhere: int = 0  # trainable tokens of segments that another rank has
    columns: Sequence[Mapping[str, Float32Array]] = ()  # further ones of each segment, as in `TrainRow`; or none
    turn_rewards: Sequence[float] = ()  # of each turn; none: the last one has the reward
    metrics: Mapping[str, float] = MappingProxyType({})  # those in `Objective.reward_weights`
    routing: Sequence[Routed] = ()  # of each segment; or none


class GradedGroup(NamedTuple):
    """The trajectories of one prompt, in the order the batch names them, and the rules that they were issued with."""

    members: Sequence[GradedTrajectory]
    estimator: str = NO_ESTIMATOR  # of their advantages, a name in `ADVANTAGES`
    temperature: float = 1.0  # that their tokens were sampled at
    before: Sequence[GradedTrajectory] = ()  # of the prompt in earlier batches, without tokens


@dataclass(frozen=True, slots=True)
class BatchStats:
    """The contents of a batch."""

    trajectories: int
    tokens_trained: int
    tokens_stale: int
    lag_histogram: dict[int, int]  # trained tokens that a policy sampled, by lag
    reward_mean: float
    reward_std: float  # over the trajectories of the batch, biased


def build_rows(
    groups: Sequence[GradedGroup], objective: Objective, *, step: int, min_version: int
) -> tuple[list[TrainRow], BatchStats]:
    """Turn the groups of one batch into rows.

    Advantages are taken over the graded members of a group by its own estimator, weights over all trainable tokens of
    the batch; stale tokens are masked last, so they take their weight with them. The first token of a segment has
    nothing before it that predicts it and is never trainable.

    Args:
        groups: of the batch, in the order it names them.
        objective: how weights are made.
        step: of the batch, from which its lags are counted.
        min_version: older tokens are masked.

    Returns:
        One row per segment, in the given order, and statistics of the batch.
    """
    trajectories = [member for group in groups for member in group.members]
    rules = [group for group in groups for _ in group.members]
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    columns = [found for one in trajectories for found in one.columns or [{}] * len(one.segments)]
    routing: list[Routed | None] = []
    for one in trajectories:
        routing += one.routing or [None] * len(one.segments)
    owner = np.repeat(np.arange(len(trajectories)), [len(trajectory.segments) for trajectory in trajectories])
    ends = np.cumsum([len(segment.tokens) for segment in segments], dtype=np.int64)
    mask, versions = _joined(segments, ends)
    counts = np.bincount(owner, weights=_segment_sums(mask, ends), minlength=len(trajectories)).astype(int)
    fresh = fresh_mask(versions, mask, min_version=min_version)
    counts += np.array([trajectory.elsewhere for trajectory in trajectories], dtype=counts.dtype)
    advantages = _advantages(groups, counts.tolist(), objective)
    weights = _weights(groups, counts.tolist(), objective)
    rows = [
        TrainRow(
            trajectory_id=trajectories[index].id,
            tokens=segment.tokens,
            mask=row_mask,
            logprobs=segment.logprobs,
            versions=segment.versions,
            advantages=of_tokens(segment, advantages[index])
            if len(advantages[index].shape)
            else np.full(len(segment.tokens), advantages[index], np.float32),
            weights=np.full(len(segment.tokens), weights[index], np.float32),
            temperature=rules[index].temperature,
            step=step,
            estimator=rules[index].estimator,
            columns=dict(further),
            hinted=segment.hinted,
            routing=routed.rows if routed is not None else None,
            routed=routed.known if routed is not None else None,
        )
        for segment, index, row_mask, further, routed in zip(
            segments, owner.tolist(), np.split(fresh, ends[:-1]), columns, routing, strict=False
        )
    ]
    rows = with_columns(rows, objective.columns)
    return rows, _stats([trajectory.reward for trajectory in trajectories], (mask, fresh, versions), step=step)


def _advantages(groups: Sequence[GradedGroup], counts: list[int], objective: Objective) -> list[Values]:
    """Of each trajectory one advantage, [], or one for each of its turns, [K]."""
    lengths = _by_group(groups, counts)
    compared = [_with_before(group) for group in groups]
    lengths = [[one.elsewhere for one in group.before] + own for group, own in zip(compared, lengths, strict=True)]
    rewards = [[member.reward for member in group.members] for group in compared]
    found = group_advantages(rewards, [group.estimator for group in groups], lengths)
    found = _of_kinds(compared, found, objective.reward_weights)
    advantages: list[Values] = []
    for group, of_members in zip(compared, found, strict=True):
        of_turns = named(ADVANTAGES, group.estimator, "advantage").of_turns
        if of_turns is None:
            values = [np.asarray(one) for one in of_members]
        else:
            turns = [member.turn_rewards or [member.reward] for member in group.members]
            values = of_turns(turns, objective.turn_discount)
        advantages += values[len(group.before) :]
    return advantages


def _with_before(group: GradedGroup) -> GradedGroup:
    """A group with its members in earlier batches first, if its estimator compares members."""
    if not (group.before and named(ADVANTAGES, group.estimator, "advantage").compares):
        return group._replace(before=())
    return group._replace(members=[*group.before, *group.members])


def _of_kinds(groups: Sequence[GradedGroup], found: list[Values], weights: Mapping[str, float]) -> list[Values]:
    """Put in the advantages of groups whose estimator takes rewards of several kinds."""
    for name in {group.estimator for group in groups}:
        of_kinds = named(ADVANTAGES, name, "advantage").of_kinds
        if of_kinds is None or not weights:
            continue
        places = [place for place, group in enumerate(groups) if group.estimator == name]
        rewards = [np.array([_kinds(member, weights) for member in groups[place].members]) for place in places]
        for place, advantages in zip(places, of_kinds(rewards, list(weights.values())), strict=True):
            found[place] = advantages
    return found


def _kinds(member: GradedTrajectory, weights: Mapping[str, float]) -> list[float]:
    """The rewards of a trajectory, of each kind.

    Raises:
        AlgorithmError: its reward gave no such metric.
    """
    if lacking := [name for name in weights if name not in member.metrics]:
        given = ", ".join(member.metrics) or "none of them"
        raise AlgorithmError(
            f'{member.id} has no metric "{lacking[0]}" (it has {given}), and learner.reward_weights names it; '
            f'let the reward return {{"reward": ..., "{lacking[0]}": ...}}'
        )
    return [member.metrics[name] for name in weights]


def skipped_stats(packed: BatchPacked) -> BatchStats:
    """Statistics of a batch that is skipped: its trajectories, and no token."""
    nothing = np.zeros(0, np.uint8)
    rewards = [member.reward for group in packed.groups for member in group.members]
    return _stats(rewards, (nothing, nothing, np.zeros(0, np.int32)), step=packed.step)


def _joined(segments: Sequence[Segment], ends: npt.NDArray[np.int64]) -> tuple[UInt8Array, Int32Array]:
    """Masks and versions of all segments end to end; the mask is a copy, without the first tokens."""
    if not segments:
        return np.zeros(0, np.uint8), np.zeros(0, np.int32)
    mask = (np.concatenate([segment.mask for segment in segments]) != 0).astype(np.uint8)
    firsts = np.concatenate([[0], ends[:-1]])
    mask[firsts[firsts < ends]] = 0
    return mask, np.concatenate([segment.versions for segment in segments])


def _segment_sums(values: UInt8Array, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    parts = np.split(values, ends)[:-1]  # no token follows the last end
    return np.array([np.count_nonzero(part) for part in parts], dtype=np.int64)


def _weights(groups: Sequence[GradedGroup], counts: list[int], objective: Objective) -> list[float]:
    by_group = _by_group(groups, counts)
    weights = token_weights(by_group, kind=objective.aggregation, constant_tokens=objective.constant_tokens)
    return list(chain.from_iterable(weights))


def _by_group(groups: Sequence[GradedGroup], counts: list[int]) -> list[list[int]]:
    rest = iter(counts)
    return [[next(rest) for _ in group.members] for group in groups]


def _stats(given: Sequence[float], tokens: tuple[UInt8Array, UInt8Array, Int32Array], *, step: int) -> BatchStats:
    mask, fresh, versions = tokens
    trained = int(np.count_nonzero(fresh))
    rewards = np.array(given, dtype=np.float64)
    return BatchStats(
        trajectories=len(given),
        tokens_trained=trained,
        tokens_stale=int(np.count_nonzero(mask)) - trained,
        lag_histogram=lag_histogram(versions, fresh, step=step),
        reward_mean=float(rewards.mean()) if rewards.size else 0.0,
        reward_std=float(rewards.std()) if rewards.size else 0.0,
    )
