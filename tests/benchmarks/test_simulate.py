"""The ideal schedule, against cases worked by hand."""

from __future__ import annotations

import random

import pytest

from benchmarks.simulate import Rules, Schedule, ideal_schedule, lower_bound_s


def play(durations: list[float], **rules: float) -> Schedule:
    settings = {"slots": 1, "batch_groups": 1, "max_lag": 0, "ahead": 0, "steps": 1, "step_s": 0.0, **rules}
    return ideal_schedule(durations.__getitem__, Rules(**settings))


def lognormal(seed: int) -> list[float]:
    draw = random.Random(seed)
    return [draw.lognormvariate(-0.72, 1.2) for _ in range(2000)]


def test_without_lag_sampling_and_training_take_turns():
    assert play([1.0, 2.0, 3.0], steps=3, step_s=10.0).trained_s == [11.0, 23.0, 36.0]


def test_with_one_version_of_lag_the_next_prompt_is_sampled_during_the_step():
    # The second prompt is issued at 0 beside the first (2 open groups) and sampled from 1 to 3 in the only slot.
    assert play([1.0, 2.0, 3.0], max_lag=1, ahead=1, steps=3, step_s=10.0).trained_s == [11.0, 21.0, 31.0]


def test_a_batch_takes_those_that_completed_first():
    # Two slots, three open groups: the short second and third make room for each other, the long first is trained last.
    schedule = play([9.0, 1.0, 2.0], slots=2, max_lag=2, ahead=1, steps=3, step_s=1.0)

    assert schedule.trained_s == [2.0, 4.0, 10.0]


def test_a_batch_waits_for_the_slowest_of_its_groups_when_no_other_may_be_issued():
    assert play([1.0, 5.0, 1.0, 1.0], slots=2, batch_groups=2, steps=2, step_s=1.0).trained_s == [6.0, 8.0]


def test_no_more_prompts_are_issued_than_are_needed():
    assert play([1.0] * 8, slots=4, batch_groups=2, max_lag=4, ahead=1, steps=3).issued == 6


def test_a_trajectory_behind_the_lag_bound_is_dropped_and_replaced():
    # The second takes from 0 to 9 while the others are trained at 2, 4 and 6. Step 4 wants tokens of version 2, which
    # came at 4: 8 of its 16 tokens. Its replacement is sampled from 9 to 10.
    durations = [1.0, 9.0, 1.0, 1.0, 1.0]
    rules = {"slots": 2, "max_lag": 1, "steps": 4, "step_s": 1.0}

    assert play(durations, **rules, min_fresh=0.5) == Schedule([2.0, 4.0, 6.0, 10.0], issued=4, dropped=0)
    assert play(durations, **rules, min_fresh=0.6) == Schedule([2.0, 4.0, 6.0, 11.0], issued=5, dropped=1)


def test_one_slot_and_a_trainer_that_takes_no_time_meet_the_bound():
    durations = lognormal(1)
    rules = Rules(slots=1, batch_groups=4, max_lag=3, ahead=1, steps=20, step_s=0.0, min_fresh=0.0)

    schedule = ideal_schedule(durations.__getitem__, rules)

    assert schedule.trained_s[-1] == pytest.approx(lower_bound_s(durations.__getitem__, rules))


def test_sampling_that_takes_no_time_leaves_the_trainer_alone():
    rules = Rules(slots=4, batch_groups=4, max_lag=0, ahead=0, steps=10, step_s=2.0)

    assert ideal_schedule(lambda number: 0.0, rules).trained_s[-1] == 20.0 == lower_bound_s(lambda number: 0.0, rules)


@pytest.mark.parametrize("seed", range(5))
def test_no_schedule_beats_the_bound_and_lag_only_helps(seed: int):
    durations = lognormal(seed)

    def time_s(lag: int) -> float:
        rules = Rules(32, 16, lag, min(1, lag), 20, 0.5, min_fresh=0.0)
        end = ideal_schedule(durations.__getitem__, rules).trained_s[-1]
        assert end >= lower_bound_s(durations.__getitem__, rules)
        return end

    times = [time_s(lag) for lag in (0, 1, 2, 4, 8)]

    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("slots", [1, 8, 32])
def test_a_slower_trainer_never_ends_earlier(slots: int):
    durations = lognormal(7)
    ends = [
        ideal_schedule(durations.__getitem__, Rules(slots, 16, 2, 1, 20, step_s, min_fresh=0.0)).trained_s[-1]
        for step_s in (0.0, 0.5, 1.0, 2.0)
    ]

    assert ends == sorted(ends)
