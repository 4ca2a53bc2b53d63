"""The slots that a config begins with."""

import pytest

from asyncrl.config.slots import first_slots
from harness.configs import from_settings


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        (["rollout.slots=100"], 100),
        (["buffer.batch_groups=32", "buffer.max_lag=2"], 128),  # half of the 256 trajectories of a batch
        (["buffer.batch_groups=32", "buffer.max_lag=2", "rollout.workers=4"], 32),
        (["buffer.batch_groups=64", "buffer.max_lag=0"], 256),  # a whole batch, as far as the engine runs it
        (["buffer.batch_groups=512", "buffer.max_lag=2"], 256),
        (["buffer.batch_groups=512", "buffer.max_lag=2", "engine.count=4"], 1024),
        (["buffer.batch_groups=1"], 16),
        (["buffer.batch_groups=32", "engine.max_running=4"], 8),  # a group
    ],
)
def test_a_worker_begins_with_the_slots_that_lag_and_engines_allow(settings: list[str], slots: int):
    assert first_slots(from_settings(*settings).config) == slots
