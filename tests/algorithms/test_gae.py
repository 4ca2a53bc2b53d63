"""Advantages and loss of a critic against loops written from the papers, and against values worked by hand."""

import dataclasses

import numpy as np
import pytest
import torch

from asyncrl.algorithms.gae import gae, gae_of_row, returns_of_row
from asyncrl.algorithms.token_loss import Tokens
from asyncrl.algorithms.value_loss import explained_variance, value_loss
from harness.training import policy_rows
from topics.batches import CriticStep, Objective


def gae_by_the_paper(rewards, values, discount, decay):
    """Eq. 16 of arXiv 1506.02438, term by term."""
    steps = len(rewards)

    def delta(t):
        following = values[t + 1] if t + 1 < steps else 0.0
        return rewards[t] + discount * following - values[t]

    return [sum((discount * decay) ** (t - start) * delta(t) for t in range(start, steps)) for start in range(steps)]


def test_gae_is_that_worked_by_hand():
    rewards, values = np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.25, 0.75])

    # deltas: 0.5 * 0.25 - 0.5 = -0.375; 0.5 * 0.75 - 0.25 = 0.125; 1 - 0.75 = 0.25; and factor 0.5 * 0.5
    found = gae(rewards, values, discount=0.5, decay=0.5)
    assert found == pytest.approx([-0.375 + 0.25 * 0.125 + 0.0625 * 0.25, 0.125 + 0.25 * 0.25, 0.25])
    # lambda 1 and gamma 1: the reward to come less the value; lambda 0: the error of one step
    assert gae(rewards, values, discount=1.0, decay=1.0) == pytest.approx([0.5, 0.75, 0.25])
    assert gae(rewards, values, discount=1.0, decay=0.0) == pytest.approx([-0.25, 0.5, 0.25])


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 33])
@pytest.mark.parametrize(("discount", "decay"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_gae_is_that_of_a_loop(steps, discount, decay):
    rng = np.random.default_rng(steps)
    rewards, values = rng.normal(size=(2, steps))

    found = gae(rewards, values, discount=discount, decay=decay)

    assert found == pytest.approx(gae_by_the_paper(rewards, values, discount, decay), rel=1e-9, abs=1e-12)


def test_only_trained_tokens_are_actions_and_the_last_has_the_reward():
    row = policy_rows(np.random.default_rng(0), 2)[1]
    size, rng = len(row.tokens), np.random.default_rng(1)
    mask = np.zeros(size, np.uint8)
    mask[[3, 4, size - 2]] = 1  # what a tool answered lies between
    columns = {name: rng.normal(size=size).astype(np.float32) for name in ("values", "penalty")}
    row = dataclasses.replace(row, mask=mask, columns=columns, advantages=np.full(size, 2.0, np.float32))
    objective = Objective(critic=CriticStep(discount=0.9, gae_lambda=0.8))

    found = gae_of_row(row, objective)

    rewards = columns["penalty"][mask == 1] + [0.0, 0.0, 2.0]
    assert found[mask == 1] == pytest.approx(
        gae_by_the_paper(rewards, columns["values"][mask == 1], 0.9, 0.8), rel=1e-5
    )
    assert not found[mask == 0].any()
    to_come = returns_of_row(row, objective)
    assert to_come[mask == 1] == pytest.approx([rewards[start:].sum() for start in range(3)], rel=1e-5)
    assert not to_come[mask == 0].any()


def tokens_of(weights, columns):
    zeros = torch.zeros(len(weights))
    return Tokens(zeros, zeros, weights, *(zeros.long() for _ in range(3)), columns)


def test_the_value_loss_is_that_of_a_loop_and_takes_the_worse_of_both_errors():
    values, old, returns = [0.9, 0.1, 0.5, 0.0], [0.5, 0.5, 0.5, 0.5], [1.0, 0.0, 0.2, 9.0]
    weights = [0.5, 0.25, 0.25, 0.0]
    given = torch.tensor(values, requires_grad=True)
    columns = {"values": torch.tensor(old), "returns": torch.tensor(returns)}
    tokens = tokens_of(torch.tensor(weights), columns)

    loss, sums = value_loss(given, tokens, clip=0.2)
    loss.backward()

    expected = 0.0
    for value, before, target, weight in zip(values, old, returns, weights, strict=True):
        near = min(max(value, before - 0.2), before + 0.2)
        expected += weight * max((value - target) ** 2, (near - target) ** 2) / 2
    # by hand: 0.9 is clipped to 0.7, error 0.09 instead of 0.01; 0.1 to 0.3, 0.09 instead of 0.01; 0.5 stays, 0.09
    assert loss.item() == pytest.approx(expected)
    assert loss.item() == pytest.approx(0.5 * (0.5 * 0.09 + 0.25 * 0.09 + 0.25 * 0.09))
    assert given.grad.tolist() == pytest.approx([0.0, 0.0, 0.25 * 0.3, 0.0])  # a clipped value does not move
    assert (sums["tokens"], sums["value_clip_fraction"]) == (3, 2)
    free, _ = value_loss(given, tokens, clip=0.0)
    assert free.item() == pytest.approx(0.5 * (0.5 * 0.01 + 0.25 * 0.01 + 0.25 * 0.09))


def test_the_explained_variance_is_that_of_values_and_returns():
    rng = np.random.default_rng(2)
    values, returns = rng.normal(size=(2, 30))
    columns = {"values": torch.tensor(values), "returns": torch.tensor(returns)}
    _, sums = value_loss(torch.tensor(values), tokens_of(torch.full((30,), 0.1), columns), clip=0.2)

    found = explained_variance({name: float(value) for name, value in sums.items()})

    assert found == pytest.approx(1 - np.var(returns - values) / np.var(returns))
    equal = {"tokens": 2.0, "_return_squared": 2.0, "return_mean": 2.0, "_error": 1.0, "_error_squared": 1.0}
    assert explained_variance(equal) == 0.0
