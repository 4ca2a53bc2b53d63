"""Settings of pools that grow and shrink with their load: the table `[autoscale]`.

The comment at a field, beside or above it, is its documentation: `asyncrl settings` and docs/settings.md print it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from asyncrl.config.setting_types import Positive, Seconds, Settings, Share
from topics.actors import MOST_PROCESSES


class PoolBounds(Settings):
    """The bounds of a pool: fewest and most processes."""

    least: Positive = 1  # Fewest processes.
    most: Annotated[int, Meta(ge=1, le=MOST_PROCESSES)] = 8  # Most processes.


class AutoscaleSettings(Settings):
    """Pools of processes that grow and shrink with their load."""

    # Pools and their bounds, such as `autoscale.pools.rollout = { least = 1, most = 8 }`: rollout, reward, groupreward,
    # judge, engine or `engine-NAME`. Empty: only `asyncrl scale` changes how many processes run.
    pools: dict[str, PoolBounds] = msgspec.field(default_factory=dict)
    # Your function of the loads, `path/to/file.py:name`, which returns how many processes each pool shall have; empty
    # takes the rule of the next two settings.
    function: str = ""
    # A pool grows where more work waits, as a share of what its processes work on at once, all through the window.
    grow_waiting: Annotated[float, Meta(gt=0)] = 0.25
    # A pool shrinks where a larger share of what its processes can work on at once was idle all through the window.
    shrink_idle: Share = 0.5
    window_s: Seconds = 15.0  # Seconds for which the load must call for a change.
    cool_s: Seconds = 60.0  # Seconds after a change of a pool in which it is left alone.
    hand_s: Seconds = 600.0  # Seconds after `asyncrl scale` in which the pools that it named are left alone.
    limit_s: Seconds = 5.0  # Seconds that a call of your function may take.
