"""The run that a command is about: the options that name it and its server, and its topics."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tomllib
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.cli.options import add_option
from asyncrl.errors import AsyncRLError, WrongUsage
from asyncrl.own_code import use_copies
from asyncrl.run.connect import FoundRun, RunNotFound, find_run, named_directory, opened
from asyncrl.run.user_actors import run_tables
from topics.table import BUILT_IN, Tables

T = TypeVar("T")


def add_settings(parser: argparse.ArgumentParser, about: str = "override a setting; repeatable") -> None:
    """Declare `--set`."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=about)


def add_config(parser: argparse.ArgumentParser, default: str = "") -> None:
    """Declare the config that a command is about."""
    about = "TOML file, a shipped config, or `-` for TOML on standard input (default: demo)"
    parser.add_argument("config", nargs="?", default=default, help=about)


def given_config(arguments: argparse.Namespace) -> str | dict[str, Any]:
    """Return the name of the config that a command is about, or the settings on standard input.

    Raises:
        WrongUsage: standard input holds no valid TOML.
    """
    if arguments.config != "-":
        return arguments.config or "demo"
    try:
        return tomllib.loads(sys.stdin.read())
    except tomllib.TOMLDecodeError as error:
        raise WrongUsage(f"standard input: found no valid TOML: {error}") from error


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Declare where runs are looked for."""
    add_option(parser, "--directory DIRECTORY", "runs", "folder that holds the runs' directories")
    parser.set_defaults(url="", credentials="")


def add_run(
    parser: argparse.ArgumentParser, default: str = "the live one, else the newest", *, remote: bool = True
) -> None:
    """Declare how a command names a run; RUN is the first of its arguments.

    Args:
        default: the run if none is named.
        remote: whether it may be on another machine.
    """
    parser.add_argument(
        "run_id", nargs="?", default="", metavar="RUN", help=f"id or directory of the run (default: {default})"
    )
    add_directory(parser)
    if remote:
        add_server(parser)


def add_action(parser: argparse.ArgumentParser, metavar: str, about: str) -> None:
    """Declare a run followed by an action; `action_of` reads it."""
    add_run(parser, "the live one")
    parser.add_argument("words", nargs="*", metavar=metavar, help=about)


def action_of(arguments: argparse.Namespace, takes: Mapping[str, str]) -> tuple[str, str]:
    """Return the action, which is named after the run or before it, and its arguments.

    Args:
        takes: what each action takes, such as `URL`; "" for nothing. The first is the default.

    Raises:
        WrongUsage: the name is unknown, or takes other arguments.
    """
    words = given = [*filter(None, [arguments.run_id]), *arguments.words]
    is_first = arguments.run_id in takes  # no run is named, or it is named last
    action, *rest = words if is_first else arguments.words or [next(iter(takes))]
    if is_first:
        arguments.run_id = rest.pop() if len(rest) > bool(takes[action]) else ""
    if action not in takes or len(rest) != bool(takes[action]):
        forms = [f"`{arguments.parser.prog} [RUN] {f'{name} {what}'.strip()}`" for name, what in takes.items()]
        raise WrongUsage(f"expected {', '.join(forms)}; found {' '.join(given)!r}")
    return action, "".join(rest)


def tell_apart(
    arguments: argparse.Namespace, field: str, names_in: Callable[[FoundRun], Collection[str]], *, live: bool = False
) -> None:
    """Take the only word of `[RUN] NAME` for the name where the run that is meant without it has that name.

    Args:
        field: of the name among the arguments.
        names_in: the names that a run has.
        live: whether a name is of a run that is not over.

    Raises:
        WrongUsage: it names a run, too, or neither.
        RunNotFound: it names no run, and none is meant without a name.
    """
    word, folder = arguments.run_id, Path(arguments.directory)
    if not word or getattr(arguments, field) or given_login(arguments) is not None:
        return
    is_run = named_directory(word, folder) is not None
    try:
        found = find_run("", folder, live=live)
    except RunNotFound as error:  # there is none, or there are several
        if is_run:
            return
        raise RunNotFound(f"{word!r} is no run under {folder.absolute()}; for a run's {field}: {error}") from error
    names, program = names_in(found), arguments.parser.prog
    if word in names and is_run:
        forms = f"`{program} {found.run} {word}` for the {field}, `{program} {folder / word}` for the run"
        raise WrongUsage(f"{word!r} is a run, and a {field} of run {found.run}; write {forms}")
    if word in names:
        arguments.run_id = ""
        setattr(arguments, field, word)
    elif not is_run:
        known = f"no {field} of run {found.run}; known: {', '.join(sorted(names)) or 'none'}"
        raise WrongUsage(f"{word!r} is no run under {folder.absolute()}, and {known}")


def add_server(parser: argparse.ArgumentParser) -> None:
    """Declare how a command reaches a server whose runs have no directory here."""
    add_option(parser, "--url URL", "", "NATS URL of a run that has no directory on this machine; RUN is then required")
    add_option(parser, "--user USER", "", "user name for that URL")
    add_option(parser, "--password-file FILE", "", "file that holds the password")
    add_option(parser, "--credentials FILE", "", "file with the login, such as runs/demo/credentials/monitor.json")
    add_option(parser, "--tls-ca FILE", "", "certificates of the server's authority, if the system does not trust it")


def add_wait(parser: argparse.ArgumentParser, default_s: float = 60.0, about: str = "seconds to wait") -> None:
    """Declare how long a command waits for its request."""
    add_option(parser, "--wait SECONDS", default_s, about)


def given_login(arguments: argparse.Namespace) -> BusAddress | None:
    """Return the server and login of the command line; None without them.

    Raises:
        RunNotFound: they cannot be read.
    """
    if not (arguments.url or arguments.credentials):
        return None
    if "@" in arguments.url:
        raise RunNotFound("--url holds credentials, which every user of this machine can read; use --password-file")
    try:
        if arguments.credentials:
            address = BusAddress.read(Path(arguments.credentials))
            changed = {"url": arguments.url, "tls_ca": arguments.tls_ca}
            return msgspec.structs.replace(address, **{key: value for key, value in changed.items() if value})
        password = Path(arguments.password_file).read_text().strip() if arguments.password_file else ""
    except (OSError, ValueError) as error:
        raise RunNotFound(f"the login cannot be read: {error}") from error
    return BusAddress(arguments.url, arguments.user, password, tls_ca=arguments.tls_ca)


def any_run(arguments: argparse.Namespace, *, live: bool = False) -> FoundRun:
    """Find the run that the command line means, live or over.

    Raises:
        RunNotFound: there is none.
    """
    login = given_login(arguments)
    if login is None:
        found = find_run(arguments.run_id, Path(arguments.directory), live=live)
        use_copies(found.files.root)  # it loads the same copies of user code as the run
        return found
    if not arguments.run_id:
        raise RunNotFound("--url and --credentials name a server, not a run: give the run's id as well")
    return FoundRun(arguments.run_id, None, login)


def live_run(arguments: argparse.Namespace) -> FoundRun:
    """Find the run that the command line means, which must not be over; raises as `any_run`."""
    return any_run(arguments, live=True)


def tables_of(arguments: argparse.Namespace) -> Tables:
    """Return the tables of the run that is meant, with its user's actors if its directory is here."""
    with contextlib.suppress(AsyncRLError, OSError):
        found = any_run(arguments)
        if found.root is not None:
            return run_tables(found.files.read_config(), found.files.base)
    return BUILT_IN


def read_topics(found: FoundRun, name: str, work: Callable[[Bus], Awaitable[T]]) -> T:
    """Do some work on the topics of a run, live or over; returns its result.

    Args:
        name: of the connection.

    Raises:
        RunNotFound: it cannot be reached.
        BusUnreachable: its own server cannot be started again.
    """
    import uvloop

    async def connected() -> T:
        async with opened(found, name) as bus:
            return await work(bus)

    result: T = uvloop.run(connected())
    return result
