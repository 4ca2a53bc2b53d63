"""Purposes that the groups of engines serve: training, or one other alone."""

from __future__ import annotations

from typing import Literal, TypeAlias

from asyncrl.config.settings import Config
from asyncrl.config.worker_pools import pool_sizes
from topics.roles import OWN, SUPERVISOR, pool_of, role_of

Purpose: TypeAlias = Literal["training", "evaluations", "live", "canary", "judges", "rubrics", "opponents"]


def setting_of(purpose: Purpose) -> str:
    """Return the setting that names the group of a purpose; "" for training, which has all other groups."""
    keys = {"evaluations": "eval.engines", "live": "gateway.engines", "canary": "gateway.canary_engines"}
    keys |= {"judges": "live.judge.engines", "rubrics": "reward.judge_engines"}
    return (keys | {"opponents": "rollout.opponent_engines"}).get(purpose, "")


def own_groups(config: Config) -> dict[Purpose, str]:
    """Return the names of groups that serve one purpose alone."""
    named: dict[Purpose, str] = {
        "evaluations": config.eval.engines,
        "live": config.gateway.engines,
        "canary": config.gateway.canary_engines,
        "judges": config.live.judge.engines,
        "rubrics": config.reward.judge_engines,
        "opponents": config.rollout.opponent_engines,
    }
    return {purpose: name for purpose, name in named.items() if name}


def serves_clients(config: Config, actor_id: str) -> bool:
    """Return whether those wait for an actor who talk to a gateway, or it is what starts the others.

    Of the user's own actors it is not known, so they count as such.
    """
    role = role_of(actor_id)
    if role == "engine":
        return purpose_of(config, actor_id) in (("live", "canary") if config.gateway.engines else ("training",))
    return role not in OWN or role in ("gateway", "router", SUPERVISOR)


def purpose_of(config: Config, engine_id: str) -> Purpose:
    """Return what an engine serves.

    Args:
        engine_id: its name, or that of its pool.
    """
    pool = engine_id if engine_id in config.engine.pools else pool_of(engine_id)
    found = [purpose for purpose, name in own_groups(config).items() if pool == f"engine-{name}"]
    return found[0] if found else "training"


def lent_pools(config: Config) -> list[str]:
    """Return the pools that a run starts without, since `asyncrl share` divides their processes among several runs."""
    pools = [*config.engine.pools, *(role for role in config.placement.lent if role != "engine"), *pool_sizes(config)]
    return [pool for pool in pools if role_of(pool) in config.placement.lent]
