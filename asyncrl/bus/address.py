"""Addresses and logins of NATS servers, as they lie in the private files of a run."""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import nats.errors

from asyncrl.bus.errors import BusUnreachable
from asyncrl.errors import UNREADABLE, DamagedFile
from asyncrl.files import write_private
from asyncrl.ports import LOOPBACK, Listen, free_port, listen_problem, url_host

_PEM = "-----BEGIN CERTIFICATE"


def _matters(record: logging.LogRecord) -> bool:
    """False for what asyncio logs, on the user's terminal, whenever a server ends a connection that turned to TLS after
    the INFO line, as every one to NATS does.
    """
    return "has no effect when using ssl" not in record.getMessage()


class BusAddress(msgspec.Struct, omit_defaults=True):
    """The address and login of a run's topics."""

    url: str
    user: str = ""
    password: str = ""
    nkey_file: str = ""  # holds an nkey seed, instead of user and password
    tls_ca: str = ""  # the certificates that the server's must be signed by, in PEM or a file; empty for the system's
    tls_cert: str = ""  # client certificate, where the server asks for one
    tls_key: str = ""
    domain: str = ""  # of JetStream, which has the streams; empty: that of the server
    runs: list[str] = []  # runs that this user serves, if it is limited to some
    websocket: str = ""  # URLs, with commas between, at which browsers reach the servers; "": they cannot

    def __repr__(self) -> str:
        return f"BusAddress({self.who} at {self.url})"  # logs and tracebacks show no password

    @property
    def who(self) -> str:
        """The user, for people."""
        if not self.user and self.nkey_file:
            return f"nkey {self.nkey_file}"
        return f"user {self.user!r}" if self.user else "user without a name"

    @property
    def ca(self) -> str:
        """The trusted certificates, for display."""
        return "the CA in the credentials" if _PEM in self.tls_ca else self.tls_ca or "the CAs that this system trusts"

    @property
    def inbox(self) -> str:
        """Return the prefix of this user's inboxes: no other user may subscribe there."""
        return f"_INBOX.{re.sub(r'[^a-zA-Z0-9-]', '_', self.user) or 'asyncrl'}"

    def save(self, path: Path) -> None:
        """Write it for other processes, readable by this user alone."""
        write_private(path, msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> BusAddress:
        """Read what `save` wrote.

        Raises:
            OSError, DamagedFile: it is not there, or no such file.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except UNREADABLE as error:
            raise DamagedFile(f"{path} holds no credentials: {error}") from error

    def login(self, speaks_tls: Callable[[], bool] = bool) -> dict[str, Any]:
        """Return the options of the client in addition to the URL.

        Args:
            speaks_tls: whether the server that was reached speaks TLS. Where the URL insists on TLS no password goes to
                one that does not: the client itself would follow a server, or a man in the middle, that does not.

        Raises:
            BusUnreachable: a file is missing or invalid.
        """
        options: dict[str, Any] = {}
        if self.nkey_file:
            options["nkeys_seed"] = _checked_seed(self.nkey_file)
        elif self.user:
            options.update(user=self.user, password=self.password)
        insists = self.url.startswith("tls://")
        if insists and "password" in options:
            options["password"] = lambda: self._password_behind(speaks_tls())
        if insists or self.tls_ca or self.tls_cert:
            options["tls"] = self._tls()
        return options

    def _password_behind(self, tls: bool) -> str:
        if not tls:
            raise nats.errors.Error("a server without TLS answers, where the URL insists on it")
        return self.password

    def _tls(self) -> ssl.SSLContext:
        logging.getLogger("asyncio").addFilter(_matters)
        given = {"cadata": self.tls_ca} if _PEM in self.tls_ca else {"cafile": self.tls_ca or None}
        try:
            context = ssl.create_default_context(**given)
        except (OSError, ssl.SSLError) as error:
            raise BusUnreachable(f"nats.tls_ca or --tls-ca: {self.ca} holds no certificates: {error}") from error
        if self.tls_cert:
            try:
                context.load_cert_chain(self.tls_cert, self.tls_key or None)
            except (OSError, ssl.SSLError) as error:
                raise BusUnreachable(
                    f"nats.tls_cert and nats.tls_key: {self.tls_cert} and {self.tls_key} are no certificate and its "
                    f"key: {error}"
                ) from error
        return context


def own_address(file: Path, listen: Listen, servers: int = 1, *, websocket: bool = True) -> BusAddress:
    """Return the owner's address of the servers that a run starts: the previous address if possible.

    Args:
        file: the previous address, if any.
        websocket: whether browsers reach the servers, on loopback at any free ports.
    """
    known = BusAddress.read(file) if file.exists() else None
    if listen.port:
        ports = list(range(listen.port, listen.port + servers))
    elif known is not None:
        before = [int(url.rsplit(":", 1)[1]) for url in known.url.split(",")]
        ports = [free_port(listen.host) if listen_problem(listen.host, port) else port for port in before]
    else:
        ports = [free_port(listen.host) for _ in range(servers)]
    url = ",".join(f"nats://{_reached_at(listen.host)}:{port}" for port in ports)
    password = known.password if known is not None else secrets.token_urlsafe(18)
    return BusAddress(url, "asyncrl", password, websocket=_own_websocket(known, ports) if websocket else "")


def _own_websocket(known: BusAddress | None, ports: list[int]) -> str:
    """Return where started servers listen for browsers: at the previous ports if these are free, not at `ports`."""
    before = known.websocket.split(",") if known is not None and known.websocket else [""] * len(ports)
    found: list[str] = []
    for url in before:
        own = free_websocket(url)
        while port_of(own) in ports:
            own = free_websocket()
        found.append(own)
    return ",".join(found)


def free_websocket(url: str = "") -> str:
    """Return a URL on loopback at which a server can listen for browsers: the given one if its port is free."""
    if url and not listen_problem(LOOPBACK, port_of(url)):
        return url
    return f"ws://{LOOPBACK}:{free_port()}"


def port_of(url: str) -> int:
    """Return the port of a URL that ends with it."""
    return int(url.rsplit(":", 1)[1])


def _reached_at(host: str) -> str:
    """The host in the URL by which this machine reaches a server."""
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return LOOPBACK if address.version == 4 else "[::1]"
    return url_host(host)


def _checked_seed(name: str) -> str:
    import nkeys  # type: ignore[import-untyped]  # publishes no types; loaded where it is needed

    try:
        nkeys.from_seed(bytearray(Path(name).read_bytes().strip())).wipe()
    except (OSError, ValueError, nkeys.NkeysError) as error:
        raise BusUnreachable(f"nats.nkey_file: {name} holds no nkey seed: {type(error).__name__} {error}") from error
    return name
