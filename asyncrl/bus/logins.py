"""The users of a run: made here for its own server, or given for an external one. Secrets lie in private files only."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.bus.address import BusAddress
from asyncrl.bus.layout import StreamLayout
from asyncrl.bus.permissions import authorization, login_roles, permissions, user_of
from asyncrl.config.process_settings import NatsSettings
from asyncrl.files import write_private
from topics.roles import MONITOR, OBSERVER
from topics.table import BUILT_IN, Tables

DEFAULT_URL = "tls://localhost:4222"


def numbered(run: str) -> Iterator[str]:
    """The names of a run and of those that follow it, as `asyncrl up` gives them: demo, demo-2, demo-3."""
    yield run
    yield from (f"{run}-{number}" for number in count(2))


def made_logins(
    runs: Sequence[str], url: str, known: Mapping[str, BusAddress], tables: Tables
) -> dict[str, BusAddress]:
    """A user for each role of some runs, with the known password or a random one."""
    logins = {}
    for role in login_roles(tables):
        password = known[role].password if role in known else secrets.token_urlsafe(18)
        logins[role] = BusAddress(url, user_of(runs[0], role), password, runs=list(runs))
    return logins


def given_logins(nats: NatsSettings, base: Path, tables: Tables = BUILT_IN) -> dict[str, BusAddress]:
    """The users that the settings name: one for each role, or one for all.

    Raises:
        OSError, ValueError: a file is missing or no such file.
    """

    def located(name: str) -> str:
        return str((base / name).absolute()) if name else ""

    files = {"tls_ca": nats.tls_ca, "tls_cert": nats.tls_cert, "tls_key": nats.tls_key}
    tls: dict[str, Any] = {key: located(name) for key, name in files.items() if name}
    if nats.credentials:
        folder = base / nats.credentials
        names = [role for role in login_roles(tables) if role != OBSERVER or (folder / f"{role}.json").exists()]
        found = {role: BusAddress.read(folder / f"{role}.json") for role in names}
        changed = tls | ({"domain": nats.domain} if nats.domain else {}) | {"websocket": nats.websocket_url}
        return {role: msgspec.structs.replace(login, url=nats.url, **changed) for role, login in found.items()}
    password = (base / nats.password_file).read_text().strip() if nats.password_file else ""
    nkey = located(nats.nkey_file)
    login = BusAddress(nats.url, nats.user, password, nkey, domain=nats.domain, websocket=nats.websocket_url, **tls)
    return dict.fromkeys(login_roles(tables), login)


def known_logins(folder: Path, tables: Tables = BUILT_IN) -> dict[str, BusAddress]:
    """Read the files of those roles that have one.

    Raises:
        OSError, ValueError: one is no such file.
    """
    files = {role: folder / f"{role}.json" for role in login_roles(tables)}
    return {role: BusAddress.read(file) for role, file in files.items() if file.exists()}


def save_logins(logins: Mapping[str, BusAddress], folder: Path) -> None:
    """Write one file per role into a folder that only this user can open."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for role, login in logins.items():
        login.save(folder / f"{role}.json")


def write_accounts(
    runs: Sequence[str],
    folder: Path,
    *,
    server: BusAddress | None = None,
    rotate: bool = False,
    tables: Tables = BUILT_IN,
) -> BusAddress:
    """Make users for an external server: `nats-accounts.conf` for it, and one file per role for the runs.

    Existing files of the folder are kept, so that no login in use ends: their users serve the new runs as well as the
    old ones, with the same passwords.

    Args:
        server: its URL, its JetStream domain, and the certificates, in PEM, that the server's must be signed by; what
            is empty is as it is known.
        rotate: make new passwords.

    Returns:
        The monitor's login.

    Raises:
        OSError, ValueError: existing files cannot be read, or new ones cannot be written.
    """
    known = known_logins(folder, tables)
    before = known.get(MONITOR, BusAddress(DEFAULT_URL))
    served = list(dict.fromkeys((*before.runs, *runs)))
    server = server or BusAddress("")
    made = made_logins(served, server.url or before.url, {} if rotate else known, tables)
    ca, domain = server.tls_ca or before.tls_ca, server.domain or before.domain
    logins = {role: msgspec.structs.replace(login, tls_ca=ca, domain=domain) for role, login in made.items()}
    save_logins(logins, folder)
    layout = StreamLayout(domain)
    users = authorization((login, permissions(role, served, tables, layout)) for role, login in logins.items())
    write_private(folder / "nats-accounts.conf", users.encode())
    return logins[MONITOR]
