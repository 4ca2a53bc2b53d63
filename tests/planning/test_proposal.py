"""The proposal of a plan, from rates."""

from asyncrl.planning.proposal import Devices, Measured, Rows, devices_of, proposal

RATES = {64: 18_000.0, 128: 25_500.0, 256: 26_000.0}
LENGTHS = [300, 700, 1000, 2300]  # sigma 0.72
ROWS = Rows(batch_groups=32, group_size=8, max_lag=2)


def test_slots_are_those_of_the_knee_where_the_lag_bound_has_room_for_them():
    found = proposal(Measured(RATES, 75_000.0, LENGTHS), ROWS, Devices(1, 1, shared=False))

    assert (found.slots, found.tokens_per_s, found.best_batch_groups) == (128, 25_500.0, 32)
    assert found.engine_busy_share == 1.0


def test_a_batch_that_is_too_small_for_the_knee_limits_the_slots_and_names_the_batch_that_would_do():
    found = proposal(Measured(RATES, 75_000.0, LENGTHS), Rows(8, 8, 2), Devices(1, 1, shared=False))

    assert found.slots < 64
    assert found.tokens_per_s < 18_000.0
    assert 20 < found.best_batch_groups <= 32


def test_a_learner_that_is_three_times_as_fast_as_an_engine_shares_one_of_two_gpus():
    assert devices_of(26_000.0, 75_000.0, 2) == Devices(2, 1, shared=True)


def test_gpus_are_divided_so_that_engines_and_ranks_are_equally_fast():
    assert devices_of(10_000.0, 30_000.0, 8) == Devices(6, 2, shared=False)
    assert devices_of(10_000.0, 10_000.0, 2) == Devices(1, 1, shared=False)


def test_one_gpu_is_shared():
    assert devices_of(10_000.0, 10_000.0, 1) == Devices(1, 1, shared=True)
