"""The divergence from a teacher over its most probable tokens, against scalar loops and numbers worked by hand."""

import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms.distillation import DIRECTIONS, with_rest
from asyncrl.algorithms.losses import loss_of
from asyncrl.algorithms.named import AlgorithmError
from asyncrl.algorithms.token_loss import Tokens
from topics.batches import Distillation, Objective

TOKENS, VOCABULARY = 6, 11


def by_hand(logits, teacher, ids, direction):
    """The formula of the module, for one position, in scalars."""
    total = sum(math.exp(one) for one in logits)
    policy = [math.exp(logits[one]) / total for one in ids]
    other = [math.exp(one) for one in teacher]
    if len(ids) < len(logits):
        policy.append(sum(math.exp(one) / total for place, one in enumerate(logits) if place not in ids))
        other.append(max(1.0 - sum(other), 1e-7))
    reverse = sum(p * (math.log(p) - math.log(q)) for p, q in zip(policy, other, strict=True))
    forward = sum(q * (math.log(q) - math.log(p)) for p, q in zip(policy, other, strict=True))
    return {"reverse": reverse, "forward": forward, "both": (reverse + forward) / 2}[direction]


def case(top_k):
    """Logits [N, V] of the policy, ids [N, K] and log-probs [N, K] of a teacher, weights [N]."""
    rng = np.random.default_rng(0)
    teacher = torch.from_numpy(rng.normal(size=(TOKENS, VOCABULARY)) * 2).log_softmax(-1)
    values, ids = teacher.topk(top_k)
    return torch.from_numpy(rng.normal(size=(TOKENS, VOCABULARY)) * 2), ids, values, torch.rand(TOKENS)


def tokens_of(ids, values, weights, outcomes):
    zeros, top = torch.zeros(TOKENS), torch.stack([ids.double(), values], -1)
    lags = torch.zeros(TOKENS, dtype=torch.long)
    return Tokens(zeros - 1.0, zeros, weights, lags, lags, lags, {"teacher_top": top, "outcomes": outcomes})


def outcomes_of(logits, ids):
    probabilities = logits.softmax(-1)
    rest = probabilities.scatter(-1, ids, 0.0).sum(-1, keepdim=True)
    named = probabilities.gather(-1, ids)
    return (torch.cat([named, rest], -1) if ids.shape[-1] < VOCABULARY else named).log()


def test_divergences_are_those_worked_by_hand():
    policy, teacher = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25]]).log()

    teacher = with_rest(teacher)  # 1/4, 1/4 and a rest of 1/2

    assert teacher.exp()[0].tolist() == pytest.approx([0.25, 0.25, 0.5])
    # 0.5 ln 2 + 0 - 0.25 ln 2; and 0.25 ln 0.5 + 0 + 0.5 ln 2: the two sums are equal here
    assert DIRECTIONS["reverse"](policy, teacher).tolist() == pytest.approx([0.25 * math.log(2)])
    assert DIRECTIONS["forward"](policy, teacher).tolist() == pytest.approx([0.25 * math.log(2)])
    policy = torch.tensor([[0.8, 0.1, 0.1]]).log()
    # 0.8 ln 3.2 + 0.1 ln 0.4 + 0.1 ln 0.2; 0.25 ln (1/3.2) + 0.25 ln 2.5 + 0.5 ln 5
    assert DIRECTIONS["reverse"](policy, teacher).tolist() == pytest.approx([0.677948], abs=1e-6)
    assert DIRECTIONS["forward"](policy, teacher).tolist() == pytest.approx([0.743004], abs=1e-6)
    assert DIRECTIONS["both"](policy, teacher).tolist() == pytest.approx([0.710476], abs=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("top_k", [1, 4, VOCABULARY])
def test_value_and_gradient_are_those_of_a_loop(direction, top_k):
    logits, ids, values, weights = case(top_k)
    objective = Objective(loss="reinforce", distillation=Distillation(top_k, 0.7, direction))

    def total(given):
        return 0.7 * sum(
            float(weights[n]) * by_hand(given[n].tolist(), values[n].tolist(), ids[n].tolist(), direction)
            for n in range(TOKENS)
        )

    leaf = logits.clone().requires_grad_()
    loss, sums = loss_of(objective)(torch.zeros(TOKENS) - 1.0, tokens_of(ids, values, weights, outcomes_of(leaf, ids)))
    loss.backward()

    assert loss.item() == pytest.approx(total(logits), rel=1e-6)
    nats = [by_hand(logits[n].tolist(), values[n].tolist(), ids[n].tolist(), direction) for n in range(TOKENS)]
    assert sums["teacher_kl"].item() == pytest.approx(sum(nats), rel=1e-6)
    for place in np.ndindex(TOKENS, VOCABULARY):
        step = torch.zeros_like(logits)
        step[place] = 1e-5
        slope = (total(logits + step) - total(logits - step)) / 2e-5
        assert leaf.grad[place].item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_over_the_whole_vocabulary_it_is_the_kl_and_over_less_no_more(direction):
    logits, ids, values, _ = case(VOCABULARY)
    policy, teacher = logits.log_softmax(-1), torch.empty_like(logits).scatter(-1, ids, values)
    reverse = torch.nn.functional.kl_div(teacher, policy, log_target=True, reduction="none").sum(-1)
    forward = torch.nn.functional.kl_div(policy, teacher, log_target=True, reduction="none").sum(-1)
    whole = {"reverse": reverse, "forward": forward, "both": (reverse + forward) / 2}[direction]

    torch.testing.assert_close(DIRECTIONS[direction](outcomes_of(logits, ids), values), whole)

    last = torch.zeros(TOKENS)
    for top_k in range(1, VOCABULARY):
        found = DIRECTIONS[direction](outcomes_of(logits, ids[:, :top_k]), with_rest(values[:, :top_k]))
        assert (found >= last - 1e-9).all()
        assert (found <= whole + 1e-6).all()
        last = found


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_extremes_are_finite(direction):
    certain = torch.tensor([[0.0, -1e3]])
    policy = torch.tensor([[-1e3, 0.0, -2e3]], requires_grad=True)

    nats = DIRECTIONS[direction](policy, with_rest(certain))
    nats.sum().backward()

    assert torch.isfinite(nats).all()
    assert torch.isfinite(policy.grad).all()


def test_rows_without_advantage_are_trained_on_and_another_direction_is_refused():
    rule = Distillation(4)
    loss = loss_of(Objective(loss="ppo", loss_options={"kl": 0.1}, distillation=rule))
    assert (loss.needs, loss.uses_advantages, loss.top_k) == (("reference", "teacher_top"), False, 4)
    with pytest.raises(AlgorithmError, match='direction "sideways" is not known here, expected one of both, forward'):
        loss_of(Objective(loss="ppo", distillation=Distillation(4, 1.0, "sideways")))
