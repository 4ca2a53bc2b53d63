"""The kinds of environments, and the form by which `task.source` and `reward.function` name an environment."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from asyncrl.environments.protocol import Environment

KINDS = ("reasoning-gym",)
"""The kinds: `make` of the module `asyncrl.environments.NAME`, with `_` for `-`, makes those of each."""

FORMS = tuple(f"{kind}:NAME" for kind in KINDS)
"""How messages name an environment of each kind."""


def is_environment(spec: str) -> bool:
    """Return whether `spec` is `KIND:NAME`, or a `KIND` without a name."""
    return spec.partition(":")[0] in KINDS


def make(kind: str, name: str, parameters: dict[str, Any], seed: int) -> Environment:
    """Make an environment; `seed` is that of its rows.

    Raises:
        DataError: unknown name, unknown parameter, or a value that the environment refuses.
    """
    module = import_module(f"asyncrl.environments.{kind.replace('-', '_')}")
    environment: Environment = module.make(name, parameters, seed)
    return environment
