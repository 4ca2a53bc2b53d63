"""The number of trajectories that rollout workers hold at once."""

from __future__ import annotations

from asyncrl.algorithms.lag import USUAL_SIGMA, slots_within_lag
from asyncrl.config.pools import purpose_of
from asyncrl.config.settings import Config
from asyncrl.config.tasks import largest_group
from asyncrl.config.worker_pools import config_of_pool, pool_of_task, pool_sizes

LEAST = 16
"""Slots of all workers together that small batches have, too: an engine with fewer requests is idle for the most part.
"""

_MOST = 256  # of each worker, if the number of servers is not known


def first_slots(config: Config) -> int:
    """Return the slots of one rollout worker at its start."""
    slots = config.rollout.slots
    return slots if isinstance(slots, int) else most_slots(config, requests_at_once(config))


def slots_for(config: Config, task: str) -> tuple[str, int]:
    """Return the table of the workers that have a task, and the slots of all of them at the start."""
    pool = pool_of_task(config, "rollout", task)
    count = pool_sizes(config, "rollout").get(pool, config.rollout.workers)
    return pool.replace("-", ".pools."), count * first_slots(config_of_pool(config, pool))


def all_slots(config: Config) -> int:
    """Return the slots of the rollout workers of all pools at the start."""
    sizes = {"rollout": config.rollout.workers} | pool_sizes(config, "rollout")
    return sum(count * first_slots(config_of_pool(config, pool)) for pool, count in sizes.items())


def rollout_workers(config: Config) -> int:
    """Return the rollout workers of all pools at the start."""
    return config.rollout.workers + sum(pool_sizes(config, "rollout").values())


def held_at_once(config: Config) -> int:
    """Return the trajectories that one rollout worker holds at its start, those that are prepared or graded too."""
    return first_slots(config) + config.sandbox.ready


def all_held(config: Config) -> int:
    """Return the trajectories that the rollout workers of all pools hold at the start."""
    sizes = {"rollout": config.rollout.workers} | pool_sizes(config)
    return sum(count * held_at_once(config_of_pool(config, pool)) for pool, count in sizes.items())


def most_slots(config: Config, requests: int, *, sigma: float = USUAL_SIGMA) -> int:
    """Return the most slots of one rollout worker with `rollout.slots = "auto"`.

    Args:
        config: of the run.
        requests: that all engines run at once.
        sigma: of the logarithm of the lengths of trajectories.
    """
    size, workers = largest_group(config), rollout_workers(config)
    if config.trains:
        rows = size * config.buffer.batch_groups
        requests = min(requests, max(LEAST, slots_within_lag(rows, config.buffer.max_lag, sigma=sigma)))
    return -(-max(size, requests) // workers)


def requests_at_once(config: Config) -> int:
    """Return the requests that the engines which start with the run and sample for training run at once."""
    groups = [group for pool, group in config.engine.pools.items() if purpose_of(config, pool) == "training"]
    return sum(group.servers * group.max_running for group in groups) or _MOST * rollout_workers(config)
