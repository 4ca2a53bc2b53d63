"""`asyncrl keys`: API keys of the clients of a run's gateway."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from datetime import UTC, datetime

from asyncrl.bus.connection import Bus
from asyncrl.bus.merged_reader import newest_message, read_each
from asyncrl.bus.publish import publish
from asyncrl.cli.options import add_flag, add_option
from asyncrl.cli.target import action_of, add_action, any_run, live_run, read_topics
from asyncrl.errors import WrongUsage
from asyncrl.live.key_usage import KeyUsage, read_key_usage
from asyncrl.live.keys import Keys, make_key
from asyncrl.state.records import counted
from topics.actors import RUN_OPENED
from topics.keys import KEY_ADDED, KEY_REVOKED, KeyAdded, KeyRevoked
from topics.wire import ID_PATTERN

_TAKES = {"list": "", "add": "", "revoke": ""}
_NONE = "its config has gateway.count = 0 (`asyncrl up chat --set model.path=FOLDER` starts a run with one)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "list keys, add or revoke one (default: list)"
    add_action(parser, "list | add --tenant NAME | revoke --key ID", about)
    add_option(parser, "--tenant TENANT", "", "with add: tenant that owns the key")
    add_option(parser, "--requests-per-minute N", 0, "with add: limit of the tenant; 0 for none")
    add_option(parser, "--tokens-per-day N", 0, "with add: limit of the tenant per day in UTC; 0 for none")
    add_flag(parser, "--private", "with add: store only counts of its requests")
    add_option(parser, "--key ID", "", "with revoke: id of the key, as list shows it")


def run(arguments: argparse.Namespace) -> int:
    """Add, list or revoke keys; a new key is printed once and stored nowhere."""
    action, _ = action_of(arguments, _TAKES)
    name = {"add": arguments.tenant, "revoke": arguments.key, "list": "-"}[action]
    if not re.match(ID_PATTERN, name):
        option = {"add": "--tenant NAME", "revoke": "--key ID"}[action]
        raise WrongUsage(f"asyncrl keys {action} needs {option}: letters, digits, _ and -; found {name!r}")
    limits = {"requests_per_minute": arguments.requests_per_minute, "tokens_per_day": arguments.tokens_per_day}
    if min(limits.values()) < 0:
        raise WrongUsage(f"a limit of a key is a whole number from 0; found {min(limits.values())}")
    made = make_key(name, **limits, private=arguments.private)
    found = any_run(arguments) if action == "list" else live_run(arguments)
    print(read_topics(found, "keys", lambda bus: _done(bus, action, name, made)))
    return 0


async def _done(bus: Bus, action: str, name: str, made: tuple[str, KeyAdded]) -> str:
    serves = await _serves(bus)
    if action == "add":
        if not serves:
            raise WrongUsage(f"run {bus.run} has no gateway that would take a key: {_NONE}")
        key, added = made
        await publish(bus, added)
        return key
    keys = await _read(bus)
    if action == "revoke":
        if name not in keys.valid:
            raise WrongUsage(f"run {bus.run} has no valid key {name!r}; `asyncrl keys list` shows those that it has")
        await publish(bus, KeyRevoked(key_id=name))
        return f"key {name} is revoked"
    usage = await read_key_usage(bus)
    rows = [f"{one.key_id}  {one.tenant}{_limits(one)}{_used(usage, one.key_id)}" for one in keys.valid.values()]
    return "\n".join(rows) or f"run {bus.run} has no keys{'' if serves else f': {_NONE}'}"


async def _serves(bus: Bus) -> bool:
    opened = await newest_message(bus, RUN_OPENED)
    return opened is not None and bool(opened[0].settings["gateway"]["count"])


def _limits(key: KeyAdded) -> str:
    words = [f"{key.requests_per_minute} requests a minute"] if key.requests_per_minute else []
    words += [f"{key.tokens_per_day} tokens a day"] if key.tokens_per_day else []
    words += ["private"] if key.private else []
    return f"  ({', '.join(words)})" if words else ""


def _used(usage: Mapping[str, KeyUsage], key_id: str) -> str:
    used = usage.get(key_id)
    if used is None:
        return "  not used"
    last = datetime.fromtimestamp(used.last_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M")
    return f"  {counted(used.replies, 'reply')}, {used.tokens:,} tokens, last at {last} UTC"


async def _read(bus: Bus) -> Keys:
    keys = Keys()
    await read_each(bus, KEY_ADDED, lambda message, _record: keys.take(message))
    await read_each(bus, KEY_REVOKED, lambda message, _record: keys.take(message))
    return keys
