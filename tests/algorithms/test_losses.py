import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms.losses import Sft
from asyncrl.algorithms.policy_loss import Bounds, Decoupled, Ppo, clipped_loss
from asyncrl.algorithms.sums import merge_sums, metrics
from asyncrl.algorithms.token_loss import Tokens

CLIP = (0.2, 0.28)


def tokens_of(behaviour, advantages, weights, **columns):
    of_tokens = (torch.tensor(values, dtype=torch.float32) for values in (behaviour, advantages, weights))
    named = {name: torch.tensor(values, dtype=torch.float32) for name, values in columns.items()}
    return Tokens(*of_tokens, torch.zeros(len(weights), dtype=torch.int64), named)


def scalar_loss(logprobs, anchors, tokens, bounds):
    """Loss and gradient, token by token, from the formula alone."""
    loss, gradient = 0.0, []
    for lp, prox, mu, advantage, weight in zip(logprobs, anchors, *tokens, strict=True):
        ratio, importance = math.exp(lp - prox), math.exp(prox - mu)
        floor, cap = bounds.weight
        if bounds.correction == "none":
            importance = 1.0
        elif bounds.correction == "clamp":
            importance = min(max(importance, floor), cap)
        elif not floor <= importance <= cap:
            importance = 0.0
        clipped = min(max(ratio, 1 - bounds.clip[0]), 1 + bounds.clip[1])
        loss -= weight * importance * min(ratio * advantage, clipped * advantage)
        active = ratio * advantage <= clipped * advantage
        gradient.append(-weight * importance * advantage * ratio if active else 0.0)
    return loss, gradient


def random_tokens():
    rng = np.random.default_rng(7)
    logprobs, anchor, behaviour = (-rng.exponential(size=40) for _ in range(3))
    return logprobs, anchor, (behaviour, rng.normal(size=40), rng.uniform(0.1, 1.0, size=40))


def assert_loss(compute, logprobs, expected):
    current = torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
    loss, _ = compute(current)
    loss.backward()
    assert loss.item() == pytest.approx(expected[0], rel=1e-4)
    assert current.grad.numpy() == pytest.approx(np.array(expected[1]), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("correction", ["none", "clamp", "mask"])
def test_loss_and_gradient_follow_the_formula(correction):
    logprobs, anchor, given = random_tokens()
    bounds, tokens = Bounds(CLIP, correction, (0.5, 1.5)), tokens_of(*given)
    proximal = torch.tensor(anchor, dtype=torch.float32)

    expected = scalar_loss(logprobs, anchor, given, bounds)

    assert_loss(lambda current: clipped_loss(current, tokens, proximal, bounds), logprobs, expected)


@pytest.mark.parametrize("correction", ["none", "clamp", "mask"])
def test_losses_anchor_the_ratio_at_the_start_of_the_step_or_at_the_sampler(correction):
    logprobs, anchor, given = random_tokens()
    bounds = Bounds(correction=correction, weight=(0.0, 1.5))
    decoupled = Decoupled(correction=correction, correction_cap=1.5)
    recomputed = Decoupled(correction=correction, correction_cap=1.5, proximal="recomputed")
    tokens, prepared = tokens_of(*given), tokens_of(*given, proximal=anchor)

    assert_loss(lambda lp: decoupled(lp, tokens), logprobs, scalar_loss(logprobs, logprobs, given, bounds))
    assert_loss(lambda lp: recomputed(lp, prepared), logprobs, scalar_loss(logprobs, anchor, given, bounds))
    against = scalar_loss(logprobs, given[0], given, Bounds(CLIP, "none"))
    assert_loss(lambda lp: Ppo()(lp, tokens), logprobs, against)


def test_clip_higher_lets_good_tokens_rise_further_than_bad_ones_fall():
    # Ratios 1.25 and 1.3 with a good token, 0.75 with a bad one; proximal is the sampler.
    logprobs = torch.log(torch.tensor([1.25, 1.3, 0.75])).requires_grad_()
    tokens = tokens_of([0.0, 0.0, 0.0], [1.0, 1.0, -1.0], [1.0, 1.0, 1.0])
    loss, sums = Ppo()(logprobs, tokens)
    loss.backward()

    assert loss.item() == pytest.approx(-(1.25 + 1.28 - 0.8))
    assert logprobs.grad.tolist() == pytest.approx([-1.25, 0.0, 0.0])
    assert metrics(sums)["clip_fraction"] == pytest.approx(2 / 3)


def test_sft_is_the_weighted_negative_log_likelihood():
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    loss, sums = Sft()(logprobs, tokens_of([0.0] * 3, [0.0] * 3, [0.5, 0.25, 0.0]))
    loss.backward()

    assert loss.item() == 1.0
    assert logprobs.grad.tolist() == [-0.5, -0.25, 0.0]
    assert metrics(sums) == {"nll": 1.5}


def test_masking_only_lowers_what_a_token_weighs():
    logprobs, tokens = torch.tensor([0.0, 0.0, 0.0]), tokens_of([-2.0, 0.0, 2.0], [1.0] * 3, [0.2] * 3)
    free, _ = Decoupled(correction="none")(logprobs, tokens)
    masked, sums = clipped_loss(logprobs, tokens, logprobs, Bounds(correction="mask", weight=(0.5, 5.0)))

    assert free.item() == pytest.approx(-0.6)
    assert masked.item() == pytest.approx(-0.2)
    assert metrics(sums)["off_policy_fraction"] == pytest.approx(2 / 3)


def test_metrics_compare_trainer_and_sampler_on_trained_tokens():
    # Ratios 2 and 1/2; the third token is not trained on.
    logprobs, behaviour = [math.log(0.5), math.log(0.2), -50.0], [math.log(0.25), math.log(0.4), 0.0]
    tokens = tokens_of(behaviour, [1.0, 1.0, 1.0], [0.5, 0.5, 0.0])
    _, sums = Decoupled()(torch.tensor(logprobs), tokens)
    found = metrics(sums)

    assert found["ratio_mean"] == pytest.approx(1.25)
    assert found["ratio_max"] == pytest.approx(2.0)
    assert found["ess"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert found["mismatch_k3"] == pytest.approx(((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 2)
    assert found["clip_fraction"] == 0.0
    assert found["off_policy_fraction"] == 0.0


def test_sums_of_parts_are_the_sums_of_the_whole():
    rng = np.random.default_rng(3)
    logprobs = torch.tensor(-rng.exponential(size=30), dtype=torch.float32)
    tokens = tokens_of(-rng.exponential(size=30), rng.normal(size=30), rng.uniform(size=30))

    whole_loss, whole = Decoupled()(logprobs, tokens)
    parts = [
        Decoupled()(logprobs[part], Tokens(*(t[part] for t in tokens[:4]), {}))
        for part in (slice(0, 7), slice(7, 7), slice(7, 30))
    ]

    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole_loss.item(), rel=1e-5)
    assert metrics(merge_sums([sums for _, sums in parts])) == pytest.approx(metrics(whole), rel=1e-5)


def test_a_token_the_sampler_found_impossible_gives_a_finite_gradient():
    for loss_of in (Decoupled(), Ppo()):
        logprobs = torch.tensor([0.0], requires_grad=True)
        tokens = tokens_of([-1000.0], [1.0], [1.0])
        loss, _ = loss_of(logprobs, tokens)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(logprobs.grad).all()


def test_an_empty_step_has_no_metrics():
    assert metrics(merge_sums([])) == {}
