"""The figures that losses give, by hand and by bucket of the lag."""

import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms.clipped_losses import Decoupled, Ppo
from asyncrl.algorithms.sums import merge_sums, metrics
from asyncrl.algorithms.token_loss import Tokens
from harness.losses import random_case, tokens_of

BINS = {
    "ratio_below_0.5": (0.0, 0.5),
    "ratio_0.5_to_0.8": (0.5, 0.8),
    "ratio_0.8_to_0.95": (0.8, 0.95),
    "ratio_0.95_to_1.05": (0.95, 1.05),
    "ratio_1.05_to_1.25": (1.05, 1.25),
    "ratio_1.25_to_2": (1.25, 2.0),
    "ratio_from_2": (2.0, math.inf),
}


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
    assert found["clip_fraction"] == found["off_policy_fraction"] == found["masked_fraction"] == 0.0


def test_figures_by_lag_are_those_of_the_tokens_with_that_lag():
    logprobs, tokens = random_case()
    tokens = tokens._replace(in_flight=torch.tensor([0, 1, 2, 3, 4, 7, 8, 200] * 3))
    loss = Ppo(masks=["m2po"])
    found = metrics(loss(torch.tensor(logprobs, dtype=torch.float32), tokens)[1])

    for kind, lags, buckets in (
        ("in_queue", tokens.in_queue, {"0": [0], "1": [1], "2_3": [2], "4_7": [4]}),
        ("in_flight", tokens.in_flight, {"0": [0], "1": [1], "2_3": [2, 3], "4_7": [4, 7], "8_up": [8, 200]}),
    ):
        for bucket, members in buckets.items():
            chosen = torch.isin(lags, torch.tensor(members)) & (tokens.weights > 0)
            ratio = np.exp(logprobs - tokens.behaviour.numpy())[chosen.numpy()]
            part = {name.partition("/")[0]: found[name] for name in found if name.endswith(f"/{kind}_{bucket}")}
            assert part.keys() == {
                *("ess", "ratio_mean", "mismatch_k3", "clip_fraction", "off_policy_fraction", "masked_fraction"),
                *BINS,
                "token_share",
            }
            assert part["token_share"] == pytest.approx(len(ratio) / int((tokens.weights > 0).sum()))
            assert part["ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-4)
            assert part["ess"] == pytest.approx(ratio.sum() ** 2 / len(ratio) / (ratio**2).sum(), rel=1e-4)
            assert part["mismatch_k3"] == pytest.approx((ratio - 1 - np.log(ratio)).mean(), rel=1e-3, abs=1e-6)
            for name, (low, high) in BINS.items():
                assert part[name] == pytest.approx(np.mean((ratio >= low) & (ratio < high)))
    names = {name for name in found if name.startswith("clip_fraction/")}
    assert len(names) == 4 + 5  # nothing of lags that no token has


def test_the_ratio_histogram_counts_each_trained_token_once():
    ratios = [0.1, 0.5, 0.6, 0.9, 1.0, 1.1, 1.25, 3.0, 2.0, 1.0]
    tokens = tokens_of([-2.0] * 10, [1.0] * 10, [1.0] * 9 + [0.0])
    _, sums = Ppo()(torch.log(torch.tensor(ratios)) - 2.0, tokens)

    found = metrics(sums)
    assert {name: round(found[name] * 9) for name in BINS} == dict(zip(BINS, [1, 2, 1, 1, 1, 1, 2], strict=True))


def test_sums_of_parts_are_the_sums_of_the_whole():
    logprobs, tokens = random_case()
    logprobs = torch.tensor(logprobs, dtype=torch.float32)

    whole_loss, whole = Decoupled()(logprobs, tokens)
    parts = [
        Decoupled()(logprobs[part], Tokens(*(t[part] for t in tokens[:6]), {}))
        for part in (slice(0, 5), slice(5, 5), slice(5, 24))
    ]

    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole_loss.item(), rel=1e-5)
    assert metrics(merge_sums([sums for _, sums in parts])) == pytest.approx(metrics(whole), rel=1e-5)


def test_an_empty_step_has_no_metrics():
    assert metrics(merge_sums([])) == {}
