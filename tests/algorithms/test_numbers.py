import numpy as np
import pytest

from asyncrl.algorithms.aggregation import token_weights
from asyncrl.algorithms.packing import first_fit
from asyncrl.algorithms.schedules import learning_rate_factor

COUNTS = [[2, 6], [0, 4, 8]]


def test_trajectory_weights_give_each_trajectory_the_same():
    assert token_weights(COUNTS, kind="trajectory") == [[1 / 10, 1 / 30], [0.0, 1 / 20, 1 / 40]]


def test_token_weights_give_each_token_the_same():
    assert token_weights(COUNTS, kind="token") == [[1 / 20, 1 / 20], [0.0, 1 / 20, 1 / 20]]


def test_group_weights_give_each_group_the_same():
    assert token_weights(COUNTS, kind="group") == [[1 / 16, 1 / 16], [0.0, 1 / 24, 1 / 24]]


def test_constant_weights_do_not_depend_on_length():
    assert token_weights(COUNTS, kind="constant", constant_tokens=10) == [[1 / 50, 1 / 50], [0.0, 1 / 50, 1 / 50]]


def test_a_constant_divisor_of_zero_is_refused():
    with pytest.raises(ValueError, match="constant_tokens"):
        token_weights(COUNTS, kind="constant", constant_tokens=0)


@pytest.mark.parametrize("kind", ["trajectory", "token", "group"])
def test_weights_add_up_to_one(kind):
    counts = [[3, 5], [7], [1, 1, 9]]
    weights = token_weights(counts, kind=kind)
    total = sum(w * c for ws, cs in zip(weights, counts, strict=True) for w, c in zip(ws, cs, strict=True))
    assert total == pytest.approx(1.0)


def test_packed_micro_batches_are_filled_by_first_fit():
    assert [rows.tolist() for rows in first_fit([3, 9, 4, 9, 1, 2], 12)] == [[1, 0], [3, 5, 4], [2]]
    assert [rows.tolist() for rows in first_fit([5, 50, 5], 10)] == [[1], [0, 2]]  # a row over the budget goes alone
    assert first_fit([], 10) == []


def test_micro_batches_hold_every_row_once_within_the_budget():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = np.exp(rng.normal(4, 1.5, rng.integers(1, 60))).astype(int) + 1
        batches = first_fit(lengths.tolist(), 600)
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
        assert all(lengths[batch].sum() <= 600 or len(batch) == 1 for batch in batches)
    with pytest.raises(ValueError, match="micro_batch_tokens is 0"):
        first_fit([1], 0)


def test_warm_up_climbs_to_the_full_rate():
    factors = [learning_rate_factor(step, kind="constant", warmup_steps=4) for step in range(1, 7)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_in_equal_steps_and_would_reach_0_after_its_last():
    factors = [learning_rate_factor(step, kind="linear", warmup_steps=2, total_steps=6) for step in (1, 2, 3, 4, 6, 60)]
    assert factors == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.2, 0.0])


def test_cosine_is_half_way_down_in_the_middle():
    factors = [learning_rate_factor(step, kind="cosine", total_steps=99) for step in (50, 100)]
    assert factors == pytest.approx([0.5, 0.0])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 1), (0, 130), (3, 4)])
def test_every_step_of_a_schedule_trains(kind, warmup_steps, total_steps):
    steps = range(1, total_steps + 1)
    rates = [learning_rate_factor(n, kind=kind, warmup_steps=warmup_steps, total_steps=total_steps) for n in steps]
    assert min(rates) > 0


def test_an_impossible_schedule_is_refused():
    with pytest.raises(ValueError, match="count from 1"):
        learning_rate_factor(0, kind="constant")
