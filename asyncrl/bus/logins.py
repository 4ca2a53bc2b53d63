"""The users of a run: made here for its own server, or given for somebody else's. Secrets lie in private files only."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from asyncrl.bus.address import BusAddress, write_private
from asyncrl.bus.permissions import ROLES, authorization, permissions, user_of
from asyncrl.settings import NatsSettings


def made_logins(run: str, url: str, known: Mapping[str, BusAddress]) -> dict[str, BusAddress]:
    """A user for each role, with a random password where none is known."""
    logins = {}
    for role in ROLES:
        password = known[role].password if role in known else secrets.token_urlsafe(18)
        logins[role] = BusAddress(url, user_of(run, role), password)
    return logins


def given_logins(nats: NatsSettings, base: Path) -> dict[str, BusAddress]:
    """The users that the settings name: one for each role, or one for all.

    Args:
        base: folder that relative paths start from.

    Raises:
        OSError, ValueError: a file is missing or no such file.
    """

    def located(name: str) -> str:
        return str((base / name).absolute()) if name else ""

    tls = {"tls_ca": located(nats.tls_ca), "tls_cert": located(nats.tls_cert), "tls_key": located(nats.tls_key)}
    if nats.credentials:
        found = read_logins(base / nats.credentials)
        return {role: msgspec.structs.replace(login, url=nats.url, **tls) for role, login in found.items()}
    password = (base / nats.password_file).read_text().strip() if nats.password_file else ""
    login = BusAddress(nats.url, nats.user, password, located(nats.nkey_file), **tls)
    return dict.fromkeys(ROLES, login)


def read_logins(folder: Path) -> dict[str, BusAddress]:
    """One file per role.

    Raises:
        OSError, ValueError: one is missing, or no such file.
    """
    return {role: BusAddress.read(folder / f"{role}.json") for role in ROLES}


def known_logins(folder: Path) -> dict[str, BusAddress]:
    """Those that are there."""
    return {role: BusAddress.read(folder / f"{role}.json") for role in ROLES if (folder / f"{role}.json").exists()}


def save_logins(logins: Mapping[str, BusAddress], folder: Path) -> None:
    """Write one file per role into a folder that only this user can open."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for role, login in logins.items():
        login.save(folder / f"{role}.json")


def accounts(run: str, logins: Mapping[str, BusAddress]) -> str:
    """The users of a run as a server's configuration takes them."""
    return authorization((logins[role], permissions(role, run)) for role in ROLES)


def write_accounts(run: str, url: str, folder: Path) -> None:
    """Make users for somebody's own server: `nats-accounts.conf` for it, and one file per role for the run."""
    logins = made_logins(run, url, {})
    save_logins(logins, folder)
    write_private(folder / "nats-accounts.conf", accounts(run, logins).encode())
