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
from topics.roles import WorkerPool, pool_of

_OWN = {"rollout": ("slots", "tool_limit_s")}
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


def pool_sizes(config: Config) -> dict[str, int]:
    """Return the processes of each pool at the start, by names such as `rollout-code`."""
    return {f"{role}-{name}": own.workers for role in _OWN for name, own in getattr(config, role).pools.items()}


def config_of_pool(config: Config, pool: str) -> Config:
    """Return the settings of a run with the slots and limits of a pool such as `rollout-code`."""
    role, _, name = pool.partition("-")
    table = getattr(config, role) if role in _OWN else None
    if table is None or name not in table.pools:
        return config
    return msgspec.structs.replace(
        config, **{role: msgspec.structs.replace(table, **given(table.pools[name], _OWN[role]))}
    )


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
        key = f"{pool.role}.pools.{pool.name}.tasks"
        if not pool.tasks:
            yield Finding((key,), f"names no task, so that its workers have no work; known are {', '.join(known)}")
        for task in pool.tasks:
            if task not in known:
                yield Finding((key,), f'names the task "{task}"; known are {", ".join(known)}')
    for role in dict.fromkeys(pool.role for pool in pools):
        named = [(task, pool.name) for pool in pools if pool.role == role for task in pool.tasks]
        for task, count in Counter(task for task, _ in named).items():
            if count > 1:
                keys = tuple(dict.fromkeys(f"{role}.pools.{name}.tasks" for other, name in named if other == task))
                yield Finding(keys, f'found the task "{task}" {count} times; name it once, in one pool of {role}')
