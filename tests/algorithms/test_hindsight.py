"""Hindsight distillation against numbers worked by hand."""

import dataclasses

import numpy as np
import pytest
import torch

from asyncrl.algorithms.hindsight import HINDSIGHT, best_hint, hindsight_of_row, hindsight_sums, overlap
from asyncrl.algorithms.losses import loss_of
from asyncrl.algorithms.rows import TrainRow
from asyncrl.algorithms.token_loss import Tokens
from topics.batches import Hindsight, Objective


def row(advantage: float, teacher: list[float]) -> TrainRow:
    """A prompt of two tokens and a reply of three, of which the sampler's log-probs were -1, -2 and -3."""
    return TrainRow(
        trajectory_id="l000000-0",
        tokens=np.arange(5, dtype=np.int32),
        mask=np.array([0, 0, 1, 1, 1], np.uint8),
        logprobs=np.array([0, 0, -1, -2, -3], np.float32),
        versions=np.array([-1, -1, 4, 4, 4], np.int32),
        advantages=np.full(5, advantage, np.float32),
        weights=np.full(5, 1 / 3, np.float32),
        columns={HINDSIGHT: np.array([0, 0, *teacher], np.float32)},
        hinted=[np.array([7, 8], np.int32)],
    )


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Hindsight(), [-1 + 0.5, -1 - 1.0, -1 + 1.0]),  # differences 0.5, -4 and 2.5, bounded to 1
        (Hindsight(w_rl=0.0), [0.5, -1.0, 1.0]),
        (Hindsight(w_rl=0.5, w_opd=2.0, clip=3.0), [-0.5 + 1.0, -0.5 - 6.0, -0.5 + 5.0]),
        (Hindsight(w_opd=0.0), [-1.0, -1.0, -1.0]),
        (Hindsight(top_k=4), [-1.0, -1.0, -1.0]),  # the differences are in the loss
    ],
)
def test_an_advantage_is_the_reward_and_the_bounded_difference(rule: Hindsight, expected: list[float]):
    found = hindsight_of_row(row(-1.0, [-0.5, -6.0, -0.5]), Objective(hindsight=rule))

    assert found.tolist() == pytest.approx([0.0, 0.0, *expected])


def test_a_reply_without_a_hint_has_its_reward_alone_and_penalties_count():
    plain = row(1.0, [-1.0, -2.0, -3.0])
    assert hindsight_of_row(plain, Objective(hindsight=Hindsight())).tolist() == [0, 0, 1, 1, 1]

    penalized = dataclasses.replace(plain, columns={**plain.columns, "penalty": np.full(5, -0.25, np.float32)})
    assert hindsight_of_row(penalized, Objective(hindsight=Hindsight())).tolist() == [0, 0, 0.75, 0.75, 0.75]


def test_figures_are_of_replies_with_a_hint():
    rows = [row(0.0, [-0.5, -6.0, -0.5]), dataclasses.replace(row(0.0, [0.0, 0.0, 0.0]), hinted=())]

    assert hindsight_sums(rows, Hindsight()) == {"hinted_fraction": 3.0, "hindsight_difference": 0.5}
    assert hindsight_sums(rows, None) == {}


def test_the_hint_whose_teacher_agrees_most_counts_not_the_first_or_longest():
    policy = np.array([[1, 2], [3, 4]], np.int32)
    far, near, equal = np.array([[5, 6], [7, 3]]), np.array([[2, 9], [4, 3]]), np.array([[1, 9], [3, 4]])

    assert [overlap(policy, one) for one in (far, near, equal)] == [1, 3, 3]
    assert best_hint(policy, [far, near, equal]) == 1


def test_over_several_tokens_the_gradient_is_the_expectation_of_the_difference():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = logits.detach().topk(2).indices
    nats = torch.tensor([[0.5, -1.0], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)  # the last has no hint
    weights = torch.tensor([0.5, 0.25, 0.25])
    logprobs = logits.log_softmax(-1)
    outcomes = logprobs.gather(-1, ids)
    zeros, lags = torch.zeros(3), torch.zeros(3, dtype=torch.long)
    columns = {"teacher_top": torch.stack([ids.double(), nats], -1), "outcomes": torch.cat([outcomes, outcomes], -1)}
    tokens = Tokens(zeros - 1.0, zeros, weights, lags, lags, lags, columns)

    loss = loss_of(Objective(loss="ppo", hindsight=Hindsight(w_opd=2.0, top_k=2)))
    total, sums = loss(logprobs[:, 0].float(), tokens)
    total.backward()

    assert loss.needs == ("teacher_top",) and loss.top_k == 2 and not loss.uses_advantages
    by_hand = torch.zeros(3, 6, dtype=torch.float64)
    policy = logits.detach().softmax(-1)
    for place in range(3):
        for entry in range(2):
            one = torch.zeros(6, dtype=torch.float64)
            one[ids[place, entry]] = 1.0
            slope = policy[place, ids[place, entry]] * (one - policy[place])  # of the token's probability
            by_hand[place] -= 2.0 * weights[place] * nats[place, entry] * slope
    assert torch.allclose(logits.grad, by_hand, atol=1e-7)
    assert sums["tokens"] == 3
