"""The user's own actors: modules that the config names, each with the row of its role and those of its topics."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.config.settings import Config
from asyncrl.config.worker_pools import worker_pools
from asyncrl.errors import AsyncRLError, FunctionError
from asyncrl.functions import is_async, load_module
from topics.roles import Role, WorkerPool
from topics.table import BUILT_IN, Tables
from topics.validate_user_topics import Rows, problem, shape_problem

_EXPECTED = "ROLE, TOPICS and async def main(context)"


class ActorsError(AsyncRLError):
    """A module that the config names holds no actor."""

    fatal = True


def run_tables(config: Config, base: Path) -> Tables:
    """Import the user's actors; returns the tables of a run with their rows and its pools of workers.

    Raises:
        ActorsError: as `load_actors`, or one of them shares messages that pools divide.
    """
    return with_pools(load_actors(config.actors, base), worker_pools(config))


def with_pools(tables: Tables, pools: Sequence[WorkerPool]) -> Tables:
    """Return the tables of a run with its pools of workers.

    Raises:
        ActorsError: a user's actor shares messages that pools divide.
    """
    divided = {role.queue for role in BUILT_IN.roles if any(pool.role == role.name for pool in pools)}
    for role in tables.roles[len(BUILT_IN.roles) :]:
        if role.queue in divided:
            words = f"its queue is {role.queue}, which the pools divide"
            raise ActorsError(f"actors: role {role.name}: {words}; subscribe to the topic, or have no pools")
    return tables.with_pools(pools)


def load_actors(modules: Iterable[str], base: Path) -> Tables:
    """Import the user's actors; returns the tables of a run with their rows.

    Args:
        modules: `path/to/file.py` or `package.module`, each with `ROLE`, `TOPICS` and `async def main(context)`.

    Raises:
        ActorsError: one of them is no such module, or its rows do not fit the tables or those of the others.
    """
    loaded = {spec: _loaded(spec, base) for spec in modules}
    rows = {spec: Rows(module.ROLE, module.TOPICS) for spec, module in loaded.items()}
    for spec, own in rows.items():
        if found := shape_problem(own):
            raise ActorsError(f"actors: {spec}: {found}")
    for spec in rows:  # each may read what another publishes
        beside = [other for name, other in rows.items() if name != spec]
        if found := problem(rows[spec], beside) or _program_problem(loaded[spec].main):
            raise ActorsError(f"actors: {spec}: {found}")
    return BUILT_IN.extended(rows.values())


def _loaded(spec: str, base: Path) -> ModuleType:
    """Import one of them.

    Raises:
        ActorsError: it cannot be imported, or has no role.
    """
    try:
        module = load_module(spec, base=base)
    except FunctionError as error:
        raise ActorsError(f"actors: {error}") from error
    missing = [name for name in ("ROLE", "TOPICS", "main") if not hasattr(module, name)]
    if missing or not isinstance(module.ROLE, Role):
        what = f"no {' and no '.join(missing)}" if missing else "a ROLE that is no asyncrl.Role"
        raise ActorsError(f"actors: {spec}: it has {what}; expected {_EXPECTED}")
    return module


def user_module(role: str, modules: Iterable[str], base: Path) -> ModuleType:
    """Return the module of a user's actor, one of those that `load_actors` has imported."""
    return next(module for module in (_loaded(spec, base) for spec in modules) if module.ROLE.name == role)


def _program_problem(main: Any) -> str:
    """Describe why a `main` cannot be run; empty if it can."""
    if not is_async(inspect.unwrap(main)):
        return f"its main is no async function; expected {_EXPECTED}"
    try:
        inspect.signature(main).bind("context")
    except TypeError as error:
        return f"its main is called with a context, and {error}; expected {_EXPECTED}"
    return ""
