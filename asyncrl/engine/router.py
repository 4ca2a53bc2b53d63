"""`sglang-router` in front of the engines: our process, its engines, and the client that samples."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec

from asyncrl.config.engine_settings import EngineGroup
from asyncrl.engine.client import EngineClient
from asyncrl.engine.errors import EngineError, EngineOverloaded, EngineUnavailable, fault_of
from asyncrl.engine.sglang.arguments import bootstrap_port
from asyncrl.engine.starting import end_of, start_at_free_port
from asyncrl.files import write_private
from asyncrl.ports import LOOPBACK, Listen, free_port
from asyncrl.process import ChildProcess, python

_ARGUMENTS = (
    # Members of a group go where the first of them went, to the engine that had the least to do then.
    *("--policy", "manual", "--assignment-mode", "min_load"),
    # A retry would sample twice, and one request that all engines fail on would close the breakers of all.
    *("--disable-retries", "--disable-circuit-breaker"),
    *("--health-check-interval-secs", "2", "--health-failure-threshold", "1", "--health-success-threshold", "1"),
    *("--worker-startup-check-interval", "1", "--log-level", "warn"),
)
# An engine that is added answers already. One that dies before it is there takes one of the router's few workers for so
# long, while others wait to be added: half an hour by the router's own default.
_JOIN_S = 10
_CALL_S = 10.0


class RouterClient(EngineClient):
    """Samples from the engines of a router; their weights, all equal, are announced to it."""

    leaves = True
    _label = ""

    def __init__(self, address: str, *, api_key: str | None, apart: bool) -> None:
        super().__init__(address, api_key=api_key)
        self.apart = apart  # separate servers compute prompts, and the label of a token does not name their weights

    def announced(self, key: str) -> None:
        """Note the weights of all its engines."""
        self._label = key

    async def label(self) -> str:
        """Return the announced engines: a router cannot list all of them."""
        return self._label

    async def health(self) -> bool:
        """Return whether it has engines."""
        try:
            await self._call("GET", "/readiness")
        except EngineError:
            return False
        return True

    def _fault(self, status: int, raw: bytes) -> EngineError:
        """An engine that has just died is not the request's fault: the router notices within seconds."""
        fault = super()._fault(status, raw)
        return EngineOverloaded(str(fault)) if b'"call_upstream_' in raw else fault


class Member(NamedTuple):
    """An engine of a router."""

    address: str
    key: str | None  # its API key
    role: str = "regular"  # "prefill", "decode"
    bootstrap_port: int | None = None  # of a prefill server


class Routed(NamedTuple):
    """The engines that a router sends requests to."""

    well: set[str]  # addresses of those wanted that answer
    alone: bool  # there are no others


class _Listed(msgspec.Struct):
    id: str
    url: str
    is_healthy: bool = False


class _List(msgspec.Struct):
    workers: list[_Listed] = []


class Router:
    """The router's process, and the engines that it knows.

    Raises, from every coroutine:
        EngineFailed: it did not start, or ended.
        EngineError: it does not answer.
    """

    def __init__(self, arguments: list[str], log_file: Path, key_file: Path, start_deadline_s: float) -> None:
        self.address = ""  # known once it has started
        self._arguments = arguments
        self._log_file = log_file
        self._key_file = key_file  # gets a new key, which the router asks for
        self._deadline_s = start_deadline_s
        self._process: ChildProcess | None = None
        self._session: aiohttp.ClientSession | None = None
        self._joining: dict[str, float] = {}  # addresses that it adds, and until when it tries

    async def start(self) -> None:
        """Start the process and return when it answers."""
        key = secrets.token_hex(32)  # it becomes an argument, which may not begin with "-"
        write_private(self._key_file, key.encode())
        headers = {"Authorization": f"Bearer {key}"}
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=_CALL_S))
        place = Listen(LOOPBACK, free_port())
        await start_at_free_port("router", place, self._launch, self._answers, self._deadline_s)

    async def _launch(self, port: int) -> ChildProcess:
        self.address = f"http://{LOOPBACK}:{port}"
        own = ["--host", LOOPBACK, "--port", str(port)]
        own += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(free_port())]
        own += ["--worker-startup-timeout-secs", str(_JOIN_S)]
        module = ("-m", "asyncrl.engine.router_process", str(self._key_file))
        command = python(*module, *own, *_ARGUMENTS, *self._arguments)
        self._process = await ChildProcess.start(command, log=self._log_file, environment={})
        return self._process

    async def ended(self) -> str:
        """Return its exit code and last output, when it has ended."""
        assert self._process is not None
        return await end_of(self._process)

    async def set_members(self, members: Mapping[str, Member]) -> Routed:
        """Send requests only to these engines, by address; running requests of others continue there.

        It takes the router a moment: call again until it is done. An engine that does not answer joins once it does.
        """
        listed = msgspec.json.decode(await self._call("GET", "/workers"), type=_List).workers
        for worker in listed:
            if worker.url not in members:
                await self._call("DELETE", f"/workers/{worker.id}")
        there, now = {worker.url for worker in listed}, time.monotonic()
        self._joining = {url: until for url, until in self._joining.items() if url not in there and until > now}
        for address in members.keys() - there - self._joining.keys():
            self._joining[address] = now + _JOIN_S
            await self._call("POST", "/workers", _body(members[address]))
        well = {worker.url for worker in listed if worker.is_healthy and worker.url in members}
        return Routed(well, alone=there <= members.keys())

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """End it."""
        if self._session is not None:
            await self._session.close()
        if self._process is not None:
            await self._process.end()

    async def _answers(self) -> bool:
        try:
            await self._call("GET", "/liveness")
        except EngineError:
            return False
        return True

    async def _call(self, method: str, path: str, body: dict[str, object] | None = None) -> bytes:
        assert self._session is not None
        try:
            async with self._session.request(method, self.address + path, json=body) as response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as fault:
            raise EngineUnavailable(self.address, f"{method} {path}: {type(fault).__name__}: {fault}") from fault
        if response.status not in (200, 202, 404):  # 404: a member that has gone already
            raise fault_of(response.status, f"{method} {path}: {raw[:500].decode(errors='replace')}")
        return raw


def member_of(group: EngineGroup, number: int, address: str, key: str | None) -> Member:
    """An engine of a group as the router knows it; its number counts from 0."""
    port = bootstrap_port(group) + number if group.role == "prefill" else None
    return Member(address, key, group.role, port)


def _body(member: Member) -> dict[str, object]:
    body: dict[str, object] = {"url": member.address, "worker_type": member.role}
    if member.key is not None:
        body["api_key"] = member.key
    if member.bootstrap_port is not None:
        body["bootstrap_port"] = member.bootstrap_port
    return body
