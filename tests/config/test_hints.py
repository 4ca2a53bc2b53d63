"""Hints about a config."""

import pytest

from asyncrl.config.hints import busy_share, hints
from harness.configs import from_settings


def test_enough_open_groups_keep_all_slots_busy_and_need_no_hint():
    assert hints(from_settings("rollout.slots=128", "rollout.group_size=8", "buffer.batch_groups=64").config) == []


def test_slots_that_hold_more_than_ends_within_the_lag_bound_are_answered_with_the_expected_waste():
    settings = "rollout.group_size=8", "buffer.batch_groups=32", "buffer.max_lag=2"

    (hint,) = hints(from_settings("rollout.slots=256", *settings).config)

    assert hint.startswith("about 20% of the sampled tokens will be too old for their batch: 256 rollout slots")
    assert hints(from_settings('rollout.slots="auto"', *settings).config) == []


def test_rollout_workers_that_scale_by_themselves_want_a_number_of_slots():
    pool = "autoscale.pools.rollout={ min = 1, max = 8 }"

    (hint,) = hints(from_settings(pool, 'rollout.slots="auto"').config)

    assert hint.startswith('rollout.slots = "auto" keeps prompts waiting, so autoscale.pools.rollout grows to 8')
    assert hints(from_settings(pool, "rollout.slots=64").config) == []


def test_more_slots_than_open_groups_are_answered_with_the_expected_busy_share():
    config = from_settings("rollout.workers=8", "engine.count=8", "rollout.slots=256").config

    assert busy_share(config) == 64 / 256
    assert hints(config) == [
        "at most 25% of the rollout slots (256 groups) will be busy: (max_lag + 1) * batch_groups = 128 groups may be "
        "open. Larger batches (buffer.batch_groups = 256) or fewer slots (rollout.slots = 64) keep all busy; so does "
        "older data, buffer.max_lag = 5"
    ]


def test_the_max_lag_of_the_hint_is_the_least_that_keeps_all_busy():
    with_lag = ["rollout.workers=8", "engine.count=8", "rollout.slots=256", "learner.keep_versions=9"]

    assert not any("will be busy" in hint for hint in hints(from_settings(*with_lag, "buffer.max_lag=5").config))
    assert any("will be busy" in hint for hint in hints(from_settings(*with_lag, "buffer.max_lag=4").config))


def test_a_run_without_rollouts_has_no_hint_about_rollout_slots():
    assert hints(from_settings('only=["engine", "gateway"]', "engine.max_running=8").config) == []


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (["engine.max_running=64", "rollout.slots=128"], "128 rollout slots share 64 running requests"),
        (["buffer.group_deadline_s=60"], "workers.stall_s = 120 s is not below buffer.group_deadline_s = 60 s"),
        (["warmup.lr_warmup_steps=63"], "warmup.lr_warmup_steps = 63 exceeds the 62 steps"),
        (["model.path=x", "model.create.hidden=8"], "model.create is not used"),
        (["learner.lora.rank=4"], "learner.lora.rank: the model that the run makes has random weights"),
        (["task.source=/rows.jsonl@[0:100]"], "evaluation takes the rows that are trained on, /rows.jsonl@[0:100]"),
    ],
)
def test_what_works_otherwise_than_it_seems_is_hinted_at(overrides, start):
    (hint,) = hints(from_settings(*overrides).config)

    assert hint.startswith(start)
