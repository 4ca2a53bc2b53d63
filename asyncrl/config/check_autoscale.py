"""Bounds of pools that contradict each other, or name a pool that a rule cannot scale."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.check import Finding
from asyncrl.config.process_settings import AutoscaleSettings
from asyncrl.config.setting_types import changed_keys
from asyncrl.config.settings import Config
from topics.roles import role_of


def autoscale_contradictions(config: Config) -> Iterator[Finding]:
    """Settings of `[autoscale]` that cannot hold."""
    settings = config.autoscale
    if not settings.pools:
        useless = [f"autoscale.{key}" for key in changed_keys(settings)]
        if useless:
            message = "has no effect: autoscale.pools names no pool; add one, such as rollout = { least = 1, most = 4 }"
            yield Finding((*useless, "autoscale.pools"), message)
        return
    most = _scaled(config)
    for pool, bounds in settings.pools.items():
        key = f"autoscale.pools.{pool}"
        if pool not in most:
            yield Finding((key,), f'found "{pool}", expected one of {", ".join(most) or "none: nothing can be scaled"}')
        elif bounds.least > bounds.most:
            message = f"found least = {bounds.least} and most = {bounds.most}; expected least to be no more than most"
            yield Finding((f"{key}.least", f"{key}.most"), message)
        elif bounds.most > most[pool]:
            message = f"found {bounds.most}, but there are GPUs for {most[pool]}; lower it or add to the GPUs of {pool}"
            yield Finding((f"{key}.most",), message)
    yield from _function(settings)


def _scaled(config: Config) -> dict[str, int]:
    """The pools of this run whose number a rule may change, with the most processes that each can have."""
    pools = {
        "rollout": config.rollout.workers,
        "reward": config.reward.workers,
        "groupreward": config.group_workers,
        "judge": config.judges,
        **{pool: group.servers for pool, group in config.engine.pools.items() if group.kind != "external"},
    }
    engines = {pool: group.most for pool, group in config.engine.pools.items()}
    return {
        pool: engines.get(pool, 1 << 20)
        for pool, count in pools.items()
        if count and (not config.only or role_of(pool) in config.only)
    }


def _function(settings: AutoscaleSettings) -> Iterator[Finding]:
    if not settings.function:
        return
    if ":" not in settings.function:
        yield Finding(("autoscale.function",), f'found "{settings.function}", expected path/to/file.py:function')
    for key in ("grow_waiting", "shrink_idle", "window_s"):
        if getattr(settings, key) != getattr(AutoscaleSettings(), key):
            message = "has no effect: autoscale.function decides instead of the rule; remove one of them"
            yield Finding((f"autoscale.{key}", "autoscale.function"), message)
