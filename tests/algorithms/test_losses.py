import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms.losses import Correction, Tokens, grpo_loss, merge_sums, metrics, sft_loss

CLIP = (0.2, 0.28)


def tokens_of(behaviour, advantages, weights):
    return Tokens(*(torch.tensor(values, dtype=torch.float32) for values in (behaviour, advantages, weights)))


def scalar_loss(logprobs, proximal, tokens, correction):
    """Loss and gradient, token by token, from the formula alone."""
    loss, gradient = 0.0, []
    anchors = tokens[0] if correction.proximal == "behaviour" else proximal
    for lp, prox, mu, advantage, weight in zip(logprobs, anchors, *tokens, strict=True):
        ratio, importance = math.exp(lp - prox), math.exp(prox - mu)
        if correction.mode == "none":
            importance = 1.0
        elif correction.mode == "clamp":
            importance = min(max(importance, correction.floor), correction.cap)
        elif not correction.floor <= importance <= correction.cap:
            importance = 0.0
        bounded = min(max(ratio, 1 - CLIP[0]), 1 + CLIP[1])
        loss -= weight * importance * min(ratio * advantage, bounded * advantage)
        active = ratio * advantage <= bounded * advantage
        gradient.append(-weight * importance * advantage * ratio if active else 0.0)
    return loss, gradient


@pytest.mark.parametrize("proximal", ["current", "behaviour"])
@pytest.mark.parametrize("mode", ["none", "clamp", "mask"])
@pytest.mark.parametrize("given", [True, False])
def test_loss_and_gradient_follow_the_formula(proximal, mode, given):
    rng = np.random.default_rng(7)
    logprobs, anchor, behaviour = (-rng.exponential(size=40) for _ in range(3))
    tokens = (behaviour, rng.normal(size=40), rng.uniform(0.1, 1.0, size=40))
    correction = Correction(proximal=proximal, mode=mode, cap=1.5, floor=0.5)
    current = torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)

    start = torch.tensor(anchor, dtype=torch.float32) if given else None
    loss, _ = grpo_loss(current, tokens_of(*tokens), clip=CLIP, correction=correction, proximal=start)
    loss.backward()

    expected, gradient = scalar_loss(logprobs, anchor if given else logprobs, tokens, correction)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert current.grad.numpy() == pytest.approx(np.array(gradient), rel=1e-4, abs=1e-6)


def test_clip_higher_lets_good_tokens_rise_further_than_bad_ones_fall():
    # Ratios 1.25 and 1.3 with a good token, 0.75 with a bad one; proximal is the sampler.
    logprobs = torch.log(torch.tensor([1.25, 1.3, 0.75])).requires_grad_()
    tokens = tokens_of([0.0, 0.0, 0.0], [1.0, 1.0, -1.0], [1.0, 1.0, 1.0])
    loss, sums = grpo_loss(logprobs, tokens, clip=CLIP, correction=Correction(proximal="behaviour"))
    loss.backward()

    assert loss.item() == pytest.approx(-(1.25 + 1.28 - 0.8))
    assert logprobs.grad.tolist() == pytest.approx([-1.25, 0.0, 0.0])
    assert metrics(sums)["clip_fraction"] == pytest.approx(2 / 3)


def test_sft_is_the_weighted_negative_log_likelihood():
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    loss, sums = sft_loss(logprobs, torch.tensor([0.5, 0.25, 0.0]))
    loss.backward()

    assert loss.item() == 1.0
    assert logprobs.grad.tolist() == [-0.5, -0.25, 0.0]
    assert metrics(sums) == {"nll": 1.5}


def test_masking_only_lowers_what_a_token_weighs():
    logprobs, tokens = torch.tensor([0.0, 0.0, 0.0]), tokens_of([-2.0, 0.0, 2.0], [1.0] * 3, [0.2] * 3)
    free, _ = grpo_loss(logprobs, tokens, clip=CLIP, correction=Correction(mode="none"))
    masked, sums = grpo_loss(logprobs, tokens, clip=CLIP, correction=Correction(mode="mask", cap=5.0, floor=0.5))

    assert free.item() == pytest.approx(-0.6)
    assert masked.item() == pytest.approx(-0.2)
    assert metrics(sums)["off_policy_fraction"] == pytest.approx(2 / 3)


def test_metrics_compare_trainer_and_sampler_on_trained_tokens():
    # Ratios 2 and 1/2; the third token is not trained on.
    logprobs, behaviour = [math.log(0.5), math.log(0.2), -50.0], [math.log(0.25), math.log(0.4), 0.0]
    tokens = tokens_of(behaviour, [1.0, 1.0, 1.0], [0.5, 0.5, 0.0])
    _, sums = grpo_loss(torch.tensor(logprobs), tokens, clip=CLIP, correction=Correction())
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

    whole_loss, whole = grpo_loss(logprobs, tokens, clip=CLIP, correction=Correction())
    parts = [
        grpo_loss(logprobs[part], Tokens(*(t[part] for t in tokens)), clip=CLIP, correction=Correction())
        for part in (slice(0, 7), slice(7, 7), slice(7, 30))
    ]

    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole_loss.item(), rel=1e-5)
    assert metrics(merge_sums([sums for _, sums in parts])) == pytest.approx(metrics(whole), rel=1e-5)


def test_a_token_the_sampler_found_impossible_gives_a_finite_gradient():
    for proximal in ("current", "behaviour"):
        logprobs = torch.tensor([0.0], requires_grad=True)
        tokens = tokens_of([-1000.0], [1.0], [1.0])
        loss, _ = grpo_loss(logprobs, tokens, clip=CLIP, correction=Correction(proximal=proximal))
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(logprobs.grad).all()


def test_an_empty_step_has_no_metrics():
    assert metrics(merge_sums([])) == {}
