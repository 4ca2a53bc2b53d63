"""Penalties of tokens against a loop over scalars, and against values worked by hand."""

import dataclasses
import math

import numpy as np
import pytest

from asyncrl.algorithms.advantages import ADVANTAGES, Estimator
from asyncrl.algorithms.kl import KL_ESTIMATORS
from asyncrl.algorithms.penalties import columns_of, kl_estimate, penalized, penalty_sums
from harness.training import policy_rows
from topics.batches import Penalty


def by_hand(kind, policy, other):
    """Schulman, joschu.net/blog/kl-approx.html, with r = q / p."""
    r = math.exp(other - policy)
    return {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": (r - 1) - math.log(r)}[kind]


def test_kl_estimates_are_those_worked_by_hand():
    policy, other = np.log([0.5, 0.25], dtype=np.float32), np.log([0.25, 0.5], dtype=np.float32)

    # log p - log q is ln 2 and -ln 2; q / p is 1/2 and 2
    assert kl_estimate(policy, other, "k1") == pytest.approx([0.693147, -0.693147], abs=1e-6)
    assert kl_estimate(policy, other, "k2") == pytest.approx([0.240227, 0.240227], abs=1e-6)
    assert kl_estimate(policy, other, "k3") == pytest.approx([0.193147, 0.306853], abs=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_unbiased_estimates_have_the_kl_as_their_mean(kind):
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.5, 0.3])

    mean = (p * kl_estimate(np.log(p), np.log(q), kind)).sum()

    assert mean == pytest.approx((p * np.log(p / q)).sum())


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_kl_estimates_are_those_of_a_loop_and_finite_at_extremes(kind):
    rng = np.random.default_rng(0)
    policy, other = -rng.exponential(size=(2, 50)).astype(np.float32)

    expected = [by_hand(kind, float(one), float(two)) for one, two in zip(policy, other, strict=True)]

    assert kl_estimate(policy, other, kind) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert np.isfinite(kl_estimate(np.float32([-1e3, 0.0]), np.float32([0.0, -1e3]), kind)).all()
    assert kl_estimate(policy, policy, kind).tolist() == [0.0] * 50


def test_a_row_has_the_penalties_of_its_tokens_in_its_advantages(monkeypatch):
    monkeypatch.setitem(ADVANTAGES, "of tokens", Estimator(list, of_row=lambda row, _objective: row.advantages))
    row, rng = policy_rows(np.random.default_rng(1), 2)[1], np.random.default_rng(2)
    columns = {name: -rng.exponential(size=len(row.tokens)).astype(np.float32) for name in ("reference", "proximal")}
    columns["teacher"] = columns["reference"][::-1]
    row = dataclasses.replace(row, columns=columns)
    penalties = [Penalty("reference", 0.5, "k3"), Penalty("teacher", 2.0, recomputed=True)]

    found = penalized(row, penalties)

    expected = [
        -0.5 * by_hand("k3", row.logprobs[place], columns["reference"][place])
        - 2.0 * (columns["proximal"][place] - columns["teacher"][place])
        if row.mask[place]
        else 0.0
        for place in range(len(row.tokens))
    ]
    assert found.columns["penalty"] == pytest.approx(expected, rel=1e-5)
    assert found.advantages == pytest.approx(row.advantages + expected, rel=1e-5)
    assert columns_of(penalties) == ("proximal", "reference", "teacher")
    own = penalized(dataclasses.replace(row, estimator="of tokens"), penalties)
    assert np.array_equal(own.advantages, row.advantages)
    assert np.array_equal(own.columns["penalty"], found.columns["penalty"])
    trained = row.mask == 1
    assert penalty_sums([found, found], penalties) == pytest.approx(
        {
            "reference_kl": 2 * kl_estimate(row.logprobs, columns["reference"], "k3")[trained].sum(),
            "teacher_kl": 2 * (columns["proximal"] - columns["teacher"])[trained].sum(),
        },
        rel=1e-5,
    )
    assert penalized(row, []) is row
