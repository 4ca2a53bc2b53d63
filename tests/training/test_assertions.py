"""Assertions hold a step's gap between sampler and trainer against the bounds of the run."""

import math

import msgspec
import pytest

from asyncrl.config.settings import Config
from asyncrl.training.anomalies import broken_assertions


def config(**bounds):
    return msgspec.convert({"learner": {"assertions": bounds}, "start": {"step": 3}}, Config)


@pytest.mark.parametrize(
    ("bounds", "step", "metrics", "keys"),
    [
        ({}, 4, {"mismatch_k3": 9.0}, []),
        ({"k3": 0.01}, 5, {"mismatch_k3": 0.01}, []),
        ({"k3": 0.01}, 5, {"mismatch_k3": 0.02}, ["k3"]),
        ({"first_k3": 0.01}, 4, {"mismatch_k3": 0.02}, ["first_k3"]),
        ({"first_k3": 0.01}, 5, {"mismatch_k3": 0.02}, []),
        ({"first_k3": 0.001, "k3": 0.01}, 4, {"mismatch_k3": 0.02}, ["k3", "first_k3"]),
        ({"k3": 0.01}, 3, {"mismatch_k3": 0.02}, []),  # before RL
        ({"k3": 0.01}, 5, {"mismatch_k3": math.nan}, ["k3"]),
        ({"first_kl": 1e-6}, 1, {"reference_k3": 1e-5}, ["first_kl"]),
        ({"first_kl": 1e-6}, 1, {"reference_kl": -1e-5, "reference_k3": 0.0}, ["first_kl"]),
        ({"first_kl": 1e-6}, 1, {"reference_kl": 0.0, "mismatch_k3": 0.1}, []),
        ({"first_kl": 1e-6}, 2, {"reference_k3": 1e-5}, []),
        ({"first_kl": 1e-6}, 4, {"reference_k3": 1e-5}, []),  # the first of a fork, whose reference may be older
    ],
)
def test_a_figure_beyond_a_bound_is_named(bounds, step, metrics, keys):
    run = config(**bounds) if step != 1 else msgspec.convert({"learner": {"assertions": bounds}}, Config)
    found = broken_assertions(run, step, metrics)
    assert [text.split("learner.assertions.")[1].split(" ")[0] for text in found] == keys


def test_what_is_said_has_both_numbers():
    [text] = broken_assertions(config(k3=0.01), 7, {"mismatch_k3": 0.25})
    assert text == "mismatch_k3 of step 7 is 0.25 nats, learner.assertions.k3 = 0.01"


def test_a_step_without_compared_tokens_breaks_nothing():
    assert broken_assertions(config(k3=0.01), 7, {"loss": 0.0}) == []
