"""The simulation of the whole loop: what is sampled within the lag bound, and what more slots cost."""

import pytest

from asyncrl.algorithms.lag import slots_within_lag
from asyncrl.engine.scripted.load_client import Lengths
from asyncrl.engine.scripted.rate_curve import SGLANG_0_6B
from benchmarks.loop_model import LoopFigures, LoopRules, simulate_loop

GROUP = 8


def simulated(batch: int, slots: int, *, lag: int = 2, sigma: float = 0.8, train: float = 75_000.0) -> LoopFigures:
    lengths = Lengths(1000, sigma)
    rules = LoopRules(slots, batch, GROUP, lag, lengths, 4096, SGLANG_0_6B, train, step_s=0.3)
    return simulate_loop(rules, steps=40, warm=10)


@pytest.mark.parametrize("batch", [4, 8, 16])
@pytest.mark.parametrize("lag", [1, 2, 4])
@pytest.mark.parametrize("sigma", [0.8, 1.2])
def test_slots_within_the_lag_bound_waste_few_tokens_and_stay_busy(batch: int, lag: int, sigma: float):
    found = simulated(batch, slots_within_lag(batch * GROUP, lag, sigma=sigma), lag=lag, sigma=sigma)

    assert found.wasted_share <= 0.05
    assert found.slots_busy > 0.95


def test_more_slots_sample_tokens_that_are_too_old():
    assert simulated(8, 4 * slots_within_lag(8 * GROUP, 2)).wasted_share > 0.15


def test_a_learner_that_is_slower_than_the_engine_is_always_busy_and_idles_the_engine():
    found = simulated(8, 32, train=6_000.0)

    assert found.learner_busy > 0.9
    assert found.sampled_tokens_per_s < 7_000


def test_without_lag_engine_and_learner_wait_for_each_other():
    found = simulated(8, 64, lag=0, train=10_000.0)

    assert found.wasted_share == 0
    assert found.trained_tokens_per_s < 0.7 * simulated(8, 32, train=10_000.0).trained_tokens_per_s


def test_a_loop_whose_updates_take_longer_than_its_steps_ends_with_the_newest_version():
    rules = LoopRules(16, 4, GROUP, 2, Lengths(1000, 0.8), 4096, SGLANG_0_6B, 75_000.0, update_s=4.0)

    assert simulate_loop(rules, steps=200, warm=10).updating > 0.5
