"""Assertions hold a step's gap between sampler and trainer against the bounds of the run."""

import math

import msgspec
import pytest

from asyncrl.config.settings import Config
from asyncrl.training.anomalies import broken_assertions


def config(**bounds):
    return msgspec.convert({"learner": {"assertions": bounds}, "start": {"step": 3}}, Config)


@pytest.mark.parametrize(
    ("bounds", "step", "gap", "keys"),
    [
        ({}, 4, 9.0, []),
        ({"k3": 0.01}, 5, 0.01, []),
        ({"k3": 0.01}, 5, 0.02, ["k3"]),
        ({"first_k3": 0.01}, 4, 0.02, ["first_k3"]),
        ({"first_k3": 0.01}, 5, 0.02, []),
        ({"first_k3": 0.001, "k3": 0.01}, 4, 0.02, ["k3", "first_k3"]),
        ({"k3": 0.01}, 3, 0.02, []),  # before RL
        ({"k3": 0.01}, 5, math.nan, ["k3"]),
    ],
)
def test_a_gap_beyond_a_bound_is_named(bounds, step, gap, keys):
    found = broken_assertions(config(**bounds), step, {"mismatch_k3": gap})
    assert [text.split("learner.assertions.")[1].split(" ")[0] for text in found] == keys


def test_what_is_said_has_both_numbers():
    [text] = broken_assertions(config(k3=0.01), 7, {"mismatch_k3": 0.25})
    assert text == "mismatch_k3 of step 7 is 0.25 nats, learner.assertions.k3 = 0.01"


def test_a_step_without_compared_tokens_breaks_nothing():
    assert broken_assertions(config(k3=0.01), 7, {"loss": 0.0}) == []
