"""Purposes that the groups of engines serve: training, or one other alone."""

from __future__ import annotations

from typing import Literal, TypeAlias

from asyncrl.config.settings import Config
from topics.roles import pool_of

Purpose: TypeAlias = Literal["training", "evaluations", "live", "canary"]


def setting_of(purpose: Purpose) -> str:
    """Return the setting that names the group of a purpose; "" for training, which has all other groups."""
    keys = {"evaluations": "eval.engines", "live": "gateway.engines", "canary": "gateway.canary_engines"}
    return keys.get(purpose, "")


def own_groups(config: Config) -> dict[Purpose, str]:
    """Return the names of groups that serve one purpose alone."""
    named: dict[Purpose, str] = {
        "evaluations": config.eval.engines,
        "live": config.gateway.engines,
        "canary": config.gateway.canary_engines,
    }
    return {purpose: name for purpose, name in named.items() if name}


def purpose_of(config: Config, engine_id: str) -> Purpose:
    """Return what an engine serves.

    Args:
        engine_id: its name, or that of its pool.
    """
    pool = engine_id if engine_id in config.engine.pools else pool_of(engine_id)
    found = [purpose for purpose, name in own_groups(config).items() if pool == f"engine-{name}"]
    return found[0] if found else "training"
