"""Penalties in the rewards of tokens: the estimated distance of the policy from another model at the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.kl import KL_ESTIMATORS
from asyncrl.algorithms.named import named
from asyncrl.algorithms.rows import TrainRow
from topics.batches import Penalty
from topics.wire import Float32Array

Values: TypeAlias = npt.NDArray[np.float64]

COLUMN = "penalty"
"""Column of the penalties of a row, which estimators of single tokens read."""


def columns_of(penalties: Sequence[Penalty]) -> tuple[str, ...]:
    """Columns that penalties are computed from."""
    policy = ("proximal",) if any(one.recomputed for one in penalties) else ()
    return tuple(dict.fromkeys((*policy, *(one.column for one in penalties))))


def penalized(row: TrainRow, penalties: Sequence[Penalty]) -> TrainRow:
    """Add the penalties of its tokens to a row, as the column `penalty`: the sum of -coef * KL, 0 outside the mask.

    An estimator of single tokens reads that column; to the advantages of any other they are added here.

    Source: KL penalty in the reward, InstructGPT, arXiv 2203.02155, eq. 2, per token. With a teacher as the other model
    and k1 it is on-policy distillation by the sampled reverse KL (MiniLLM, arXiv 2306.08543, section 2.2, without
    the sum over later tokens).
    """
    if not penalties:
        return row
    total = np.zeros(len(row.tokens))
    for one in penalties:
        total -= one.coef * _kl(row, one)
    column = np.where(row.mask != 0, total, 0.0).astype(np.float32)
    alone = ADVANTAGES[row.estimator].of_row is None
    advantages = row.advantages + column if alone else row.advantages
    return replace(row, advantages=advantages, columns={**row.columns, COLUMN: column})


def penalty_sums(rows: Sequence[TrainRow], penalties: Sequence[Penalty]) -> dict[str, float]:
    """Sums of each KL over the tokens that have a gradient, for `metrics`: `reference_kl`, `teacher_kl`."""
    return {
        f"{one.column}_kl": sum(float(_kl(row, one)[(row.mask != 0) & (row.weights > 0)].sum()) for row in rows)
        for one in penalties
    }


def live_kl_sums(rows: Sequence[TrainRow]) -> dict[str, float]:
    """Sums over the trained tokens of live turns: k3 from the sampler to the column `reference`, and their number."""
    found = {"nats": 0.0, "tokens": 0.0}
    for row in rows:
        trained = (row.mask != 0) & (row.weights > 0)
        found["nats"] += float(kl_estimate(row.logprobs, row.columns["reference"], "k3")[trained].sum())
        found["tokens"] += float(trained.sum())
    return found


def _kl(row: TrainRow, penalty: Penalty) -> Values:
    policy = row.columns["proximal"] if penalty.recomputed else row.logprobs
    return kl_estimate(policy, row.columns[penalty.column], penalty.estimator)


def kl_estimate(policy: Float32Array, other: Float32Array, kind: str) -> Values:
    """Estimates of KL(policy || other) from the log-probs that both give to tokens which the policy sampled.

    Args:
        policy: [T] natural log.
        other: [T] natural log.
        kind: a name in `KL_ESTIMATORS`.

    Returns:
        [T] nats.
    """
    import torch  # where rows are; those who read a config need none

    difference = torch.from_numpy(np.subtract(policy, other, dtype=np.float64))
    values: Values = named(KL_ESTIMATORS, kind, "KL estimator")(difference).numpy()
    return values
