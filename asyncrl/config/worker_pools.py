"""The pools of workers of a run: their tasks, and the settings of their processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from asyncrl.config.finding import Finding
from asyncrl.config.held_out import graded_tasks
from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.config.setting_types import given
from asyncrl.config.settings import Config
from asyncrl.config.task_settings import RewardSettings
from topics.roles import WorkerPool, pool_of

_OWN = {"rollout": ("slots", "tool_limit_s"), "reward": ("children", "time_limit_s", "memory_mb", "in_flight")}
"""Settings of a pool that replace those of the table of its role."""


def worker_pools(config: Config) -> list[WorkerPool]:
    """Return the pools of a run."""
    return pools_in(msgspec.to_builtins({role: {"pools": getattr(config, role).pools} for role in _OWN}))


def pools_in(settings: Mapping[str, Any]) -> list[WorkerPool]:
    """Return the pools of a run, by its settings as plain data."""
    tables = {role: settings.get(role, {}).get("pools", {}) for role in _OWN}
    return [
        WorkerPool(role, name, tuple(pool["tasks"] or tables["rollout"].get(name, pool)["tasks"]))
        for role, pools in tables.items()
        for name, pool in pools.items()
    ]


def pool_sizes(config: Config, *roles: str) -> dict[str, int]:
    """Return the processes of each pool of some roles, or of all, at the start, by names such as `rollout-code`."""
    roles = roles or tuple(_OWN)
    return {f"{role}-{name}": own.workers for role in roles for name, own in getattr(config, role).pools.items()}


def config_of_pool(config: Config, pool: str) -> Config:
    """Return the settings of a run with the slots and limits of a pool such as `rollout-code`."""
    role, _, name = pool.partition("-")
    table = getattr(config, role) if role in _OWN else None
    if table is None or name not in table.pools:
        return config
    return msgspec.structs.replace(
        config, **{role: msgspec.structs.replace(table, **given(table.pools[name], _OWN[role]))}
    )


def reward_tables(config: Config) -> dict[str, RewardSettings]:
    """Return the settings of the reward workers of each pool, by their tables."""
    pools = {f"reward.pools.{name}": config_of_pool(config, f"reward-{name}").reward for name in config.reward.pools}
    return {"reward": config.reward} | pools


def reward_of_task(config: Config, task: str) -> RewardSettings:
    """Return the settings of the reward workers that grade a task."""
    return config_of_pool(config, pool_of_task(config, "reward", task)).reward


def config_of_actor(config: Config, actor_id: str) -> Config:
    """Return the settings of a run as one of its processes has them."""
    pool = pool_of(actor_id)
    return msgspec.structs.replace(config_of_pool(config, pool), sandbox=sandbox_of_pool(config, pool))


def sandbox_of_pool(config: Config, pool: str) -> SandboxSettings:
    """Return the sandboxes of the workers of a pool.

    Raises:
        msgspec.ValidationError: the pool has a setting that sandboxes do not have, or a value out of its range.
    """
    own = config.rollout.pools.get(pool.removeprefix("rollout-"))
    if own is None:
        return config.sandbox
    return msgspec.convert(msgspec.to_builtins(config.sandbox) | own.sandbox, SandboxSettings)


def pool_of_task(config: Config, role: str, task: str) -> str:
    """Return the pool of a role whose workers have a task: `rollout`, or `rollout-code`."""
    return next((one.pool for one in worker_pools(config) if one.role == role and task in one.tasks), role)


def _unfit_sandboxes(config: Config) -> Iterator[Finding]:
    for name in config.rollout.pools:
        try:
            sandbox_of_pool(config, f"rollout-{name}")
        except msgspec.ValidationError as error:
            yield Finding((f"rollout.pools.{name}.sandbox",), f"{error}; expected settings of [sandbox]")


def check_pools(config: Config) -> Iterator[Finding]:
    """Find pools without tasks, with unknown ones, and tasks in two pools."""
    known, pools = graded_tasks(config), worker_pools(config)
    yield from _unfit_sandboxes(config)
    for pool in pools:
        if not pool.tasks:
            message = f"names no task, so that its workers have no work; known are {', '.join(known)}"
            if pool.role == "reward" and config.rollout.pools:
                message += f". Without tasks it needs the name of a rollout pool: {', '.join(config.rollout.pools)}"
            yield Finding((_key(pool),), message)
    for task in dict.fromkeys(task for pool in pools for task in pool.tasks):
        having = [pool for pool in pools for name in pool.tasks if name == task]
        role, count = Counter(pool.role for pool in having).most_common(1)[0]
        keys = tuple(dict.fromkeys(_key(pool) for pool in having if pool.role == role or task not in known))
        if task not in known:
            yield Finding(keys, f'names the task "{task}"; known are {", ".join(known)}')
        elif count > 1:
            yield Finding(keys, f'found the task "{task}" {count} times; name it once, in one pool of {role}')


def _key(pool: WorkerPool) -> str:
    return f"{pool.role}.pools.{pool.name}.tasks"
