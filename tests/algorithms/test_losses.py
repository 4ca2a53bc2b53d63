"""Each loss against a scalar loop over its formula, with the gradient taken by differences."""

import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms.clipped_losses import Decoupled, Gspo, Ppo, interpolated
from asyncrl.algorithms.held_losses import Cispo, Dppo, Reinforce
from asyncrl.algorithms.losses import Sft
from asyncrl.algorithms.masks import MASKS
from asyncrl.algorithms.sapo import Sapo
from asyncrl.algorithms.sums import metrics
from harness.losses import ROWS, random_case, tokens_of


class Scalars:
    """The tokens of a case as numbers, and what formulas are made of."""

    def __init__(self, tokens):
        self.mu, self.advantage, self.weight = (values.double().tolist() for values in tokens[:3])
        self.rows, self.queue, self.flight = (values.tolist() for values in tokens[3:6])
        self.columns = {name: values.double().tolist() for name, values in tokens.columns.items()}

    def row(self, i):
        return [j for j in range(len(self.rows)) if self.rows[j] == self.rows[i] and self.weight[j] > 0]

    def mean(self, values, i):
        return sum(values[j] for j in self.row(i)) / len(self.row(i))


def clip(value, low, high):
    return min(max(value, 1.0 - low), 1.0 + high)


def ppo(s, lp, held, i):
    r, a = math.exp(lp[i] - s.mu[i]), s.advantage[i]
    return min(r * a, clip(r, 0.2, 0.28) * a)


def dual(s, lp, held, i):
    return ppo(s, lp, held, i) if s.advantage[i] >= 0 else max(ppo(s, lp, held, i), 1.3 * s.advantage[i])


def gspo(s, lp, held, i):
    mean = s.mean([p - q for p, q in zip(held, s.mu, strict=True)], i)
    r, a = math.exp(mean) * math.exp(lp[i]) / math.exp(held[i]), s.advantage[i]
    return min(r * a, clip(r, 0.03, 0.04) * a)


def cispo(s, lp, held, i):
    return clip(math.exp(held[i] - s.mu[i]), 0.1, 0.2) * s.advantage[i] * lp[i]


def reinforce(s, lp, held, i):
    return min(math.exp(held[i] - s.mu[i]), 1.1) * s.advantage[i] * lp[i]


def sapo(s, lp, held, i):
    r, a = math.exp(lp[i] - s.mu[i]), s.advantage[i]
    t = 2.0 if a > 0 else 3.0
    return 4.0 / t / (1.0 + math.exp(-t * (r - 1.0))) * a


def dppo(divergence, cap, cap_negative=None):
    def gain(s, lp, held, i):
        p, q, a = math.exp(held[i]), math.exp(s.mu[i]), s.advantage[i]
        away = (p > q and a > 0) or (p < q and a < 0)
        bound = cap if a > 0 or cap_negative is None else cap_negative
        return 0.0 if away and divergence(p, q) > bound else math.exp(lp[i] - s.mu[i]) * a

    return gain


def to_the_sampler(s, lp, held, i):
    return dppo(lambda p, q: abs(p - q), 0.02, 0.1)(s, lp, held, i) - 0.3 * (lp[i] - s.mu[i]) ** 2


def binary_kl(p, q):
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def decoupled(proximal, weight):
    """With r = p / p' the gain w min(r A, clip(r) A)."""

    def gain(s, lp, held, i):
        anchors = [proximal(s, held, j) for j in range(len(lp))]
        r, a = math.exp(lp[i] - anchors[i]), s.advantage[i]
        log_weights = [anchor - mu for anchor, mu in zip(anchors, s.mu, strict=True)]
        return weight(s, log_weights, i) * min(r * a, clip(r, 0.2, 0.28) * a)

    return gain


def current(s, held, i):
    return held[i]


def recomputed(s, held, i):
    return s.columns["proximal"][i]


def by_version(s, held, i):
    """The version before the trainer's, of those from the sampler's on, log-linearly (AReaL)."""
    lag = s.queue[i] + s.flight[i]
    done = (lag - 1) / lag if lag else 1.0
    return s.mu[i] + done * (held[i] - s.mu[i])


def clamped(s, log_weights, i):
    return min(max(math.exp(log_weights[i]), 0.8), 1.2)


def kept_inside(value):
    return value if 0.8 <= value <= 1.2 else 0.0


def masked(s, log_weights, i):
    return kept_inside(math.exp(log_weights[i]))


def of_row_mean(s, log_weights, i):
    return min(max(math.exp(s.mean(log_weights, i)), 0.8), 1.2)


def of_row_product(s, log_weights, i):
    return kept_inside(math.exp(s.mean(log_weights, i) * len(s.row(i))))


BOUNDS = {"correction_floor": 0.8, "correction_cap": 1.2}
CASES = {
    "ppo": (Ppo(), ppo),
    "dual clip": (Ppo(dual_clip=1.3), dual),
    "gspo": (Gspo(clip_low=0.03, clip_high=0.04), gspo),
    "cispo": (Cispo(clip_low=0.1, clip_high=0.2), cispo),
    "reinforce": (Reinforce(ratio_cap=1.1), reinforce),
    "dppo, tv": (Dppo(divergence_cap=0.05), dppo(lambda p, q: abs(p - q), 0.05)),
    "dppo, two caps": (
        Dppo(divergence_cap=0.02, divergence_cap_negative=0.1, sampler_kl=0.3),
        to_the_sampler,
    ),
    "sapo": (Sapo(temperature_positive=2.0, temperature_negative=3.0), sapo),
    "dppo, kl": (Dppo(divergence="kl", divergence_cap=0.01), dppo(binary_kl, 0.01)),
    "tis": (Decoupled(**BOUNDS), decoupled(current, clamped)),
    "tis, default": (Decoupled(), decoupled(current, lambda s, log_weights, i: min(math.exp(log_weights[i]), 2.0))),
    "no correction": (Decoupled(correction="none"), decoupled(current, lambda s, log_weights, i: 1.0)),
    "icepop": (Decoupled(correction="mask", **BOUNDS), decoupled(current, masked)),
    "recomputed": (Decoupled(proximal="recomputed", **BOUNDS), decoupled(recomputed, clamped)),
    "interpolated": (Decoupled(proximal="interpolated", **BOUNDS), decoupled(by_version, clamped)),
    "sequence tis": (Decoupled(correction_level="geometric", **BOUNDS), decoupled(current, of_row_mean)),
    "sequence mis": (
        Decoupled(correction_level="product", correction="mask", **BOUNDS),
        decoupled(current, of_row_product),
    ),
}


def assert_loss(loss, logprobs, tokens, formula):
    """Compare value and gradient with those of `formula(s, lp, held, i)`, the loss of a token of weight 1."""
    s = Scalars(tokens)

    def total(lp):
        of_tokens = (s.weight[i] * formula(s, lp, list(logprobs), i) for i in range(len(lp)) if s.weight[i] > 0)
        return sum(of_tokens)

    steps = np.eye(len(logprobs)) * 1e-6
    expected = [(total(list(logprobs + step)) - total(list(logprobs - step))) / 2e-6 for step in steps]
    given = torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
    found, sums = loss(given, tokens)
    found.backward()
    assert found.item() == pytest.approx(total(list(logprobs)), rel=1e-4, abs=1e-5)
    assert given.grad.numpy() == pytest.approx(np.array(expected), rel=1e-3, abs=1e-4)
    return sums


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [7, 8])
def test_loss_and_gradient_follow_the_formula(case, seed):
    loss, gain = CASES[case]
    logprobs, tokens = random_case(seed)
    sums = assert_loss(loss, logprobs, tokens, lambda s, lp, held, i: -gain(s, lp, held, i))

    if case not in ("tis, default", "no correction", "tis", "sapo"):
        treated = metrics(sums)["clip_fraction"] + metrics(sums)["off_policy_fraction"]
        assert 0 < treated < 2, "a case where nothing is clipped proves nothing"


def test_the_default_weight_is_capped_at_2():
    logprobs, tokens = random_case()
    logprobs[:3] = -0.05
    tokens.behaviour[:3] = -3.0
    sums = assert_loss(Decoupled(), logprobs, tokens, lambda *given: -CASES["tis, default"][1](*given))
    assert metrics(sums)["off_policy_fraction"] > 0


def nats(kind, d):
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_the_divergence_from_the_reference_is_added(kind, unbiased):
    def formula(s, lp, held, i):
        value = nats(kind, lp[i] - s.columns["reference"][i])
        return -ppo(s, lp, held, i) + 0.3 * value * (math.exp(lp[i] - s.mu[i]) if unbiased else 1.0)

    logprobs, tokens = random_case()
    sums = assert_loss(Ppo(kl=0.3, kl_estimator=kind, kl_unbiased=unbiased), logprobs, tokens, formula)

    s = Scalars(tokens)
    of_tokens = [nats("k3", logprobs[i] - s.columns["reference"][i]) for i in range(len(ROWS)) if s.weight[i] > 0]
    assert metrics(sums)["reference_k3"] == pytest.approx(np.mean(of_tokens), rel=1e-4)
    assert Ppo(kl=0.3).needs == ("reference",)
    assert not Ppo(kl=0.3).uses_advantages


def test_the_unbiased_form_has_the_expectation_and_the_gradient_of_the_divergence():
    logits, reference = torch.tensor([0.3, -1.0, 0.8], requires_grad=True), torch.tensor([0.2, 0.5, 0.3]).log()
    sampler = torch.tensor([0.6, 0.3, 0.1]).log()
    logprobs = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    for kind in ("k1", "k3"):
        # Every token once, weighted by how often the sampler takes it.
        tokens = tokens_of(sampler, [0.0] * 3, sampler.exp(), rows=[0, 1, 2], reference=reference)
        loss, _ = Ppo(kl=1.0, kl_estimator=kind, kl_unbiased=True)(logprobs, tokens)
        (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert loss.item() == pytest.approx((logprobs.exp() * (logprobs - reference)).sum().item(), rel=1e-5)
        assert torch.allclose(found, expected, atol=1e-6)


def test_entropy_is_subtracted_with_its_gradient():
    logprobs, tokens = random_case()
    entropy = tokens.columns["entropy"].requires_grad_()
    with_bonus, _ = Ppo(entropy=0.2)(torch.tensor(logprobs, dtype=torch.float32), tokens)
    without, _ = Ppo()(torch.tensor(logprobs, dtype=torch.float32), tokens)
    with_bonus.backward()

    assert (without - with_bonus).item() == pytest.approx(0.2 * (tokens.weights * entropy).sum().item(), rel=1e-5)
    assert torch.equal(entropy.grad, -0.2 * tokens.weights)
    assert not Ppo(entropy=0.2).uses_advantages
    assert Ppo(entropy=0.2).uses_entropy


def geometric_mask(s, logs, i):
    return not 0.9 <= math.exp(s.mean(logs, i)) <= 1.05


def product_mask(s, logs, i):
    return not 0.9 <= math.exp(s.mean(logs, i) * len(s.row(i))) <= 1.05


def opsm_mask(s, logs, i):
    return s.advantage[i] < 0 and s.mean([-value for value in logs], i) > 0.01


MASK_LOOPS = {
    "geometric": geometric_mask,
    "product": product_mask,
    "m2po": lambda s, logs, i: i % 6 == 2,  # as the column has it
    "opsm": opsm_mask,
    "in_queue": lambda s, logs, i: s.queue[i] > 1,
    "in_flight": lambda s, logs, i: s.flight[i] > 1,
}
assert MASK_LOOPS.keys() == MASKS.keys()
MASK_OPTIONS = {"sequence_floor": 0.9, "sequence_cap": 1.05, "opsm_cap": 0.01}


@pytest.mark.parametrize("names", [*([name] for name in MASKS), ["opsm", "m2po", "in_flight"]], ids="-".join)
def test_masked_tokens_have_no_gain_and_no_other_token_has_more(names):
    def formula(s, lp, held, i):
        logs = [p - q for p, q in zip(held, s.mu, strict=True)]
        return 0.0 if any(MASK_LOOPS[name](s, logs, i) for name in names) else -ppo(s, lp, held, i)

    found = []
    for seed in range(4):
        logprobs, tokens = random_case(seed)
        found.append(metrics(assert_loss(Ppo(masks=names, **MASK_OPTIONS), logprobs, tokens, formula)))

    assert 0 < np.mean([figures["masked_fraction"] for figures in found]) < 1


def test_the_interpolated_policy_is_the_trainers_without_lag_and_the_samplers_after_one_version():
    tokens = tokens_of([-2.0] * 4, [1.0] * 4, [1.0] * 4, in_queue=[0, 1, 1, 3], in_flight=[0, 0, 1, 1])
    # With lag 2 the policy one version back is half way, with lag 4 three quarters of the way.
    assert interpolated(torch.full((4,), -1.0), tokens).tolist() == [-1.0, -2.0, -1.5, -1.25]


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


def test_a_token_the_sampler_found_impossible_gives_a_finite_gradient():
    for loss_of in (Decoupled(), Ppo(), Gspo(), Cispo(), Reinforce(), Dppo(), Dppo(divergence="kl")):
        logprobs = torch.tensor([0.0], requires_grad=True)
        tokens = tokens_of([-1000.0], [1.0], [1.0])
        loss, _ = loss_of(logprobs, tokens)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(logprobs.grad).all()
