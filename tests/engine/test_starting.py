"""A server that is started at a port which was free, and is taken when it listens."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from aiohttp import ClientError, ClientSession

from asyncrl.engine.starting import start_at_free_port
from asyncrl.ports import LOOPBACK, Listen, free_port
from asyncrl.process import ChildProcess, python


class Server:
    """A server of files, whose port others take before it starts so often."""

    def __init__(self, overtaken: int) -> None:
        self.processes: list[ChildProcess] = []
        self.ports: list[int] = []
        self._overtaken = overtaken
        self._others = contextlib.ExitStack()

    async def launch(self, port: int) -> ChildProcess:
        if len(self.ports) < self._overtaken:
            self._others.enter_context(taken(port))
        self.ports.append(port)
        command = python("-m", "http.server", str(port), "--bind", LOOPBACK)
        self.processes.append(await ChildProcess.start(command, piped=True))
        return self.processes[-1]

    async def answers(self) -> bool:
        try:
            async with ClientSession() as http, http.head(f"http://{LOOPBACK}:{self.ports[-1]}/"):
                return True
        except ClientError:
            return False

    async def close(self) -> None:
        self._others.close()
        for process in self.processes:
            await process.end()


@contextlib.contextmanager
def taken(port: int) -> Iterator[None]:
    with socket.create_server((LOOPBACK, port), backlog=0):
        yield


async def test_a_server_whose_port_has_been_taken_listens_at_another():
    server, first = Server(overtaken=1), free_port()
    try:
        with taken(first):
            await start_at_free_port("server", Listen(LOOPBACK, first), server.launch, server.answers, 60)
        assert len(server.ports) == 2
        assert first not in server.ports
        assert [process.returncode is None for process in server.processes] == [False, True]
    finally:
        await server.close()
