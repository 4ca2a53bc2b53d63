"""`asyncrl engines`: list the inference servers of a run; add and remove external servers during the run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from asyncrl.api.requests import watched
from asyncrl.bus.log import read_newest
from asyncrl.bus.publish import Fenced, publish, publish_if_latest
from asyncrl.cli.options import add_option
from asyncrl.cli.output import add_json, show
from asyncrl.cli.target import action_of, add_action, add_wait, live_run
from asyncrl.config.engine_settings import Capability
from asyncrl.errors import AsyncRLError, WrongUsage
from asyncrl.files import fault_of_secret, write_private
from asyncrl.ports import places_of
from asyncrl.run.connect import FoundRun, connected
from asyncrl.state.records import Engine
from asyncrl.state.run_state import RunState
from topics.engines import ENGINE_ANNOUNCED, EngineAnnounced, EngineWithdrawn, announced_name
from topics.roles import pool_of
from topics.topic import ACTORS

_CONNECT_S = 3.0
_TAKES = {"list": "", "add": "URL", "remove": "NAME"}


class ListedEngine(msgspec.Struct):
    """One server as `--json` prints it."""

    name: str
    kind: str
    state: str
    version: int | None
    address: str
    requests: int
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_action(parser, "list | add URL | remove NAME", "list servers, add or remove one (default: list)")
    add_option(parser, "--key-file FILE", Path, "with add: file that holds the server's API key")
    add_option(parser, "--max-running N", 256, "with add: requests that it runs at once")
    add_json(parser, "the list as JSON")
    add_wait(parser)


def run(arguments: argparse.Namespace) -> int:
    """List, or request and wait until it is done."""
    action, name = action_of(arguments, _TAKES)
    found = live_run(arguments)
    if action == "list":
        listed = asyncio.run(_listed(found))
        show(arguments, listed, lambda: engines_text(listed))
    elif action == "add":
        print(asyncio.run(_add(found, name, arguments)))
    else:
        print(asyncio.run(_remove(found, name, arguments.wait)))
    return 0


def engines_text(engines: list[ListedEngine]) -> str:
    """One line for each server."""
    lines = []
    width = max((len(engine.name) for engine in engines), default=0)
    for engine in engines:
        version = "-" if engine.version is None else f"v{engine.version}"
        about = (
            f"{engine.name:<{width}}  {engine.kind:<9} {engine.state:<9} {version:<6} {engine.requests:>5} requests  "
        )
        lines.append(f"{about}{engine.address}{'  ' + engine.reason if engine.reason else ''}")
    return "\n".join(lines) or "there are no engines; announce one with `asyncrl engines add URL`"


async def _listed(found: FoundRun) -> list[ListedEngine]:
    async with watched(found, "engines") as (_, state, _):
        listed = []
        routers = state.names_of("router") if state.config.engine.router.count else []
        for name in [*state.names_of("engine"), *routers]:
            engine, actor = state.engines.get(name, Engine(name)), state.actors.get(name)
            begun = max(engine.ready_ns, engine.updating_ns, engine.gone_ns)
            requests = int((actor.gauge("requests") or 0) if actor is not None else 0)
            reason = _reason(state, name) if begun and engine.state == "gone" else ""
            address = engine.address or state.announced.get(name, "")
            kind = "router" if name in routers else state.config.engine.group_of(name).kind
            what = engine.state if begun else "starting"
            listed.append(ListedEngine(name, kind, what, engine.shown, address, requests, reason))
        return listed


async def _add(found: FoundRun, address: str, arguments: argparse.Namespace) -> str:
    """Announce a server, and wait until it has confirmed the newest weights."""
    address = address.rstrip("/")
    try:
        name = announced_name(address)
    except ValueError as error:
        raise WrongUsage(str(error)) from error
    key = _key(found, arguments.key_file)
    while True:
        with contextlib.suppress(Fenced):  # another server was announced at the same time: it may be this one
            return await _announce(found, EngineAnnounced(name, address, arguments.max_running), key, arguments.wait)


async def _announce(found: FoundRun, server: EngineAnnounced, key: bytes | None, wait_s: float) -> str:
    """Announce a server that the run has not; raises `Fenced` where another one is announced at the same time."""
    name, address = server.engine_id, server.address
    async with connected(found, "engines") as bus:  # all earlier announcements are known below
        newest = await read_newest(bus, ACTORS, ENGINE_ANNOUNCED.pattern(bus.run))
    async with watched(found, "engines") as (bus, state, until):
        await asyncio.to_thread(_refuse_known, known_servers(state), name, address)
        if not state.config.engine.have(Capability.MODEL):
            raise AsyncRLError(f"run {found.run} has scripted engines, which cannot be mixed with servers of a model")
        if found.root is not None and state.config.placement.one_machine:
            await _check_reachable(address)
        if key is not None and found.root is not None:
            write_private(found.files.key_of(name), key)
        before = state.engines.get(name, Engine(name)).ready_ns
        at = newest.sequence if newest is not None else 0
        await publish_if_latest(bus, server, at, fence=ENGINE_ANNOUNCED.pattern(bus.run))

        def done() -> bool:
            ready = state.engines.get(name, Engine(name)).ready_ns > before
            actor = state.actors.get(name)
            awaited = state.version is None and state.config.trains  # no weights are published yet
            return ready or (awaited and actor is not None and actor.live)

        if not await until(done, wait_s):
            words = _reason(state, name)
            raise AsyncRLError(
                f"{name} is announced and has not confirmed the weights within {wait_s:.0f} s"
                f"{': ' + words if words else ''}; `asyncrl engines remove {name}` takes it back"
            )
        version = state.engines.get(name, Engine(name)).version
    return f"{name} has " + ("no weights yet: none are published" if version is None else f"version {version}")


async def _check_reachable(address: str) -> None:
    """Refuse a server that this machine, where its engine actor would run, cannot connect to.

    Raises:
        AsyncRLError: why it cannot.
    """
    parts = urlsplit(address)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except OSError as error:
        why = str(error) or f"no answer within {_CONNECT_S:g} s"
        raise AsyncRLError(
            f"{address} cannot be reached: {why}; it is not announced, start the server first"
        ) from error
    writer.close()


def known_servers(state: RunState) -> dict[str, str]:
    """Return the addresses of the servers that a run has, and their names; those that were removed may be added."""
    pools = state.config.engine.pools.items()
    named = {f"{pool}-{number}": at for pool, group in pools for number, at in enumerate(group.addresses, 1)}
    known = {at: one for one, at in (named | state.announced).items() if one not in state.withdrawn}
    return known | {one.address: one.engine_id for one in state.engines.values() if one.address and one.state != "gone"}


def _refuse_known(known: Mapping[str, str], name: str, address: str) -> None:
    """Refuse a server that the run has under another name, or another server under this name.

    Raises:
        AsyncRLError: which one it is.
    """
    places = places_of(address)
    for other, of in known.items():
        same = bool(places & places_of(other))
        if same != (of == name):
            what = "the same server" if same else f"another one, and both would be called {name}"
            raise AsyncRLError(f"{of} of this run is {other}, and {address} is {what}: it is not added")


def _reason(state: RunState, name: str) -> str:
    """Return why an engine takes no requests: the error of its actor, if that left because of one."""
    engine, actor = state.engines.get(name, Engine(name)), state.actors.get(name)
    error = actor.last_error if actor is not None and (engine.asked or not engine.gone_ns) else ""
    return error or engine.reason


def _key(found: FoundRun, key_file: Path | None) -> bytes | None:
    if key_file is None:
        return None
    if found.root is None:
        raise WrongUsage("--key-file puts the key into the directory of the run, which is not here: run this there")
    try:
        key = key_file.read_bytes()  # once: it may be a pipe
        held = fault_of_secret(key)
    except OSError as error:
        held = error.strerror or str(error)
    if held:
        raise WrongUsage(f"{key_file}: found {held.lower()}, expected a readable file that holds the key alone")
    return key


async def _remove(found: FoundRun, name: str, wait_s: float) -> str:
    """Remove an external server; its requests move to other engines."""
    async with watched(found, "engines") as (bus, state, until):
        names = state.names_of("engine")
        if name not in names:
            raise WrongUsage(f"run {found.run} has no engine {name}; there are {', '.join(names) or 'none'}")
        if not state.config.engine.group_of(name).can(Capability.ADDRESSES):
            pool = pool_of(name)
            raise WrongUsage(f"{name} was started by the run; `asyncrl scale {pool}=COUNT` changes how many there are")
        await publish(bus, EngineWithdrawn(name))
        if not await until(lambda: name not in {actor.actor_id for actor in state.fleet if actor.live}, wait_s):
            raise AsyncRLError(f"{name} has not left within {wait_s:.0f} s")
    if found.root is not None:
        found.files.key_of(name).unlink(missing_ok=True)
    return f"{name} has left"
