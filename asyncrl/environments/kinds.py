"""The kinds of environments: `KIND` of the module of each."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from asyncrl.environments.protocol import Environment, EnvironmentKind


def environment_kind(name: str) -> EnvironmentKind:
    """Return the kind of a name."""
    kind: EnvironmentKind = import_module(f"asyncrl.environments.{name.replace('-', '_')}.kind").KIND
    return kind


def make(kind: str, name: str, parameters: dict[str, Any], seed: int, base: Path = Path()) -> Environment:
    """Make an environment; `seed` is that of its rows.

    Args:
        base: folder that relative paths start from.

    Raises:
        DataError: unknown name, unknown parameter, or a value that the environment refuses.
    """
    return environment_kind(kind).make(name, parameters, seed, base)
