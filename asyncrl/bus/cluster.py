"""Three NATS servers on this machine that keep every stream three times: any one may die without a loss."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path
from typing import TypeAlias

import msgspec

from asyncrl.bus.address import BusAddress, own_address
from asyncrl.bus.server import EmbeddedServer, Place, users_of
from asyncrl.ports import ANY_PORT, Listen, free_port

SERVERS = 3


class EmbeddedCluster:
    """`nats-server` child processes that know each other; each keeps its port and its store over restarts."""

    def __init__(self, directory: Path, run: str = "", listen: Listen = ANY_PORT) -> None:
        self.directory = directory
        self.address = own_address(directory / "nats.json", listen, SERVERS)
        users = users_of(self.address, run, directory / "credentials")
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
            place = Place(msgspec.structs.replace(self.address, url=url), users, config)
            self.nodes.append(EmbeddedServer(directory / f"nats-{number}", listen=listen, place=place))

    async def start(self, deadline_s: float = 20.0) -> BusAddress:
        """Start all servers and return once each takes connections.

        Raises:
            BusUnreachable: with the last output of one that does not come up.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self.address.save(self.directory / "nats.json")
        try:
            await asyncio.gather(*(node.start(deadline_s) for node in self.nodes))
        except BaseException:
            await self.stop()
            raise
        return self.address

    async def stop(self) -> None:
        """Stop all servers; their stores stay."""
        await asyncio.gather(*(node.stop() for node in self.nodes))


OwnServer: TypeAlias = EmbeddedServer | EmbeddedCluster


def own_server(directory: Path, run: str, servers: int, listen: Listen) -> OwnServer:
    """The server or servers that a run starts for itself."""
    return EmbeddedCluster(directory, run, listen) if servers > 1 else EmbeddedServer(directory, run, listen)


def server_left_in(directory: Path) -> OwnServer | None:
    """Return the server with the topics of a run that is over, where it had its own."""
    if (directory / "nats-1").is_dir():
        return EmbeddedCluster(directory)
    return EmbeddedServer(directory) if (directory / "nats").is_dir() else None
