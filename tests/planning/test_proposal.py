"""The proposal of a plan, from rates."""

from asyncrl.planning.plan import devices_for, settings_for
from asyncrl.planning.proposal import Devices, Measured, Rows, devices_of, proposal
from harness.configs import from_settings

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


GPUS = ("engine.kind=sglang", "engine.gpus=[1]", "learner.device=cuda:0", "rollout.workers=2")


def test_the_settings_of_a_shared_gpu_are_those_that_a_check_accepts():
    measured = Measured(RATES, 75_000.0, LENGTHS)
    config = from_settings(*GPUS).config

    proposed = settings_for(config, proposal(measured, ROWS, devices_for(config, measured)))

    assert proposed["engine.gpus"] == [0, 1]
    assert proposed["rollout.slots"] == 67
    changed = [f"{key}={str(value).lower() if isinstance(value, list) else value}" for key, value in proposed.items()]
    assert from_settings(*GPUS, *changed).config.placement.colocate == "memory"


def test_on_a_cpu_engine_and_learner_have_a_core_each():
    assert devices_for(from_settings().config, Measured(RATES, 75_000.0, LENGTHS)) == Devices(1, 1, shared=False)
