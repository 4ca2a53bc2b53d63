"""Hindsight distillation: a teacher that is told what a reply should have minded scores the reply that was given.

The advantage of a reply token is the teacher's log-prob after a prompt with a hint, minus the log-prob of the policy
that sampled it after the prompt without the hint, bounded by `Hindsight.clip`. Both are at the temperature of the
reply. Of several hints the one counts whose teacher agrees most with the policy: a hint that makes the whole reply
improbable says nothing about its tokens.

Source: OpenClaw-RL, arXiv 2603.10165, section 3 (hints, combination); the choice by overlap and the bound on the
difference in its "top-k select" recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.algorithms.distillation import OverTop
from asyncrl.algorithms.rows import TOP, TrainRow
from asyncrl.algorithms.token_loss import Loss, Tokens
from topics.batches import Hindsight, Objective
from topics.wire import Float32Array, Int32Array

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.token_loss import Sums

HINDSIGHT = "hindsight"
"""Column of the teacher's log-probs of a reply after its hint; of a row without a hint, those of its sampler."""


def differences(row: TrainRow, rule: Hindsight) -> Float32Array:
    """Bounded log-prob of the teacher less that of the sampler, of each trained token; 0 elsewhere.

    Args:
        row: with the column `hindsight`.

    Returns:
        [T] nats.
    """
    nats = np.subtract(row.columns[HINDSIGHT], row.logprobs, dtype=np.float64)
    return np.where(row.mask != 0, nats.clip(-rule.clip, rule.clip), 0.0).astype(np.float32)


def hindsight_of_row(row: TrainRow, objective: Objective) -> Float32Array:
    """Advantages of the tokens of a reply: `w_rl` times its reward's, and `w_opd` times the differences.

    With `top_k` the second part is in the loss (`Guided`).

    Returns:
        [T], 0 outside the mask.
    """
    rule = objective.hindsight or Hindsight()
    advantages = rule.w_rl * row.advantages.astype(np.float64)
    if not rule.top_k:
        advantages += rule.w_opd * differences(row, rule)
    advantages += row.columns.get("penalty", np.float32(0.0))
    return np.where(row.mask != 0, advantages, 0.0).astype(np.float32)


def hindsight_sums(rows: Sequence[TrainRow], rule: Hindsight | None) -> dict[str, float]:
    """Sums over the tokens that have a gradient, for `metrics`: `hinted_fraction`, those of replies with a hint, and
    `hindsight_difference`, the bounded differences.
    """
    if rule is None:
        return {}
    hinted, nats = 0.0, 0.0
    for row in rows:
        trained = (row.mask != 0) & (row.weights > 0)
        hinted += float(trained.sum()) if row.hinted else 0.0
        nats += float(differences(row, rule)[trained].sum()) if row.hinted else 0.0
    return {"hinted_fraction": hinted, "hindsight_difference": nats}


def overlap(policy: Int32Array, teacher: Int32Array) -> int:
    """Number of tokens that are among the likeliest of both, summed over the places of a reply.

    Args:
        policy: [R, K] distinct ids at each place.
        teacher: [R, K] distinct ids at each place.
    """
    return int((policy[:, :, None] == teacher[:, None, :]).sum())


def best_hint(policy: Int32Array, teachers: Sequence[Int32Array]) -> int:
    """Place of the hint whose teacher has the largest `overlap` with the policy; of equal ones the first.

    Args:
        policy: [R, K].
        teachers: [R, K] after each hint, at least one.
    """
    found = [overlap(policy, teacher) for teacher in teachers]
    return found.index(max(found))


class Guided(OverTop, frozen=True):
    """A loss, less `w_opd` times the mean difference over the tokens that the policy found most probable before the
    step, weighted by their probabilities now.

    At the weights before the step its gradient is the expectation of that of the sampled form over these tokens
    (OpenClaw-RL, distillation on the student's top-k).
    """

    def __call__(self, logprobs: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Sums]:
        """See `Loss`. The column `teacher_top` has the ids, and their bounded differences."""
        nats = tokens.columns[TOP][..., 1]
        gains = (tokens.columns["outcomes"][..., : nats.shape[-1]].exp() * nats).sum(-1)
        loss, sums = self.loss(logprobs, tokens)
        return loss - self.rule.w_opd * (tokens.weights.float() * gains).sum(), sums


def guided(loss: Loss, rule: Hindsight | None) -> Loss:
    """The loss of a step with hints over several tokens of each place; otherwise the loss itself."""
    return loss if rule is None or not rule.top_k else Guided(loss=loss, rule=rule)
