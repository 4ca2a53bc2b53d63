"""Purposes that the groups of engines serve: training, or one other alone."""

from __future__ import annotations

from typing import Literal, TypeAlias

from asyncrl.config.settings import Config
from asyncrl.config.worker_pools import pool_sizes
from topics.roles import OWN, SUPERVISOR, pool_of, role_of

Purpose: TypeAlias = Literal["training", "evaluations", "live", "canary", "judges", "rubrics", "opponents"]


SECOND: tuple[Purpose, ...] = ("judges", "rubrics", "opponents")
"""Purposes whose engines do not follow training, and may have a second model."""


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


def model_of(config: Config, purpose: Purpose) -> str:
    """Return the directory of the second model that engines of a purpose have; "" for the policy."""
    group = config.engine.groups.get(own_groups(config).get(purpose, ""))
    return group.model if group is not None else ""


def version_of(config: Config, purpose: Purpose) -> int:
    """Return the version that judges and opponents have: the first one of the run, or 0 of a second model."""
    return 0 if model_of(config, purpose) else config.start.step


def keep_first(config: Config) -> bool:
    """Return whether engines keep the first version of the run: judges or opponents that are the policy itself."""
    own = own_groups(config)
    return any(purpose in own and not model_of(config, purpose) for purpose in SECOND)


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
