"""The user's own actors: modules that the config names, each with the row of its role and those of its topics."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from asyncrl.errors import AsyncRLError, FunctionError
from asyncrl.functions import load_module
from topics.roles import Role
from topics.table import register

_MODULES: dict[str, ModuleType] = {}  # by role


class ActorsError(AsyncRLError):
    """A module that the config names holds no actor."""

    fatal = True


def load_actors(modules: Iterable[str], base: Path) -> None:
    """Import the user's actors and add their rows to the tables; each once per process.

    Args:
        modules: `path/to/file.py` or `package.module`, each with `ROLE`, `TOPICS` and `async def main(context)`.

    Raises:
        ActorsError: one of them is no such module, or its rows do not fit the tables.
    """
    for spec in modules:
        try:
            module = load_module(spec, base=base)
            missing = [name for name in ("ROLE", "TOPICS", "main") if not hasattr(module, name)]
            if missing or not isinstance(module.ROLE, Role):
                what = f"no {' and no '.join(missing)}" if missing else "a ROLE that is no asyncrl.Role"
                raise ValueError(f"it has {what}; expected ROLE, TOPICS and async def main(context)")
            register(module.ROLE, module.TOPICS)
        except (FunctionError, ValueError) as error:
            raise ActorsError(f"actors: {error}" if spec in str(error) else f"actors: {spec}: {error}") from error
        _MODULES[module.ROLE.name] = module


def user_module(role: str) -> ModuleType | None:
    """Return the module of a user's actor, where it was loaded."""
    return _MODULES.get(role)
