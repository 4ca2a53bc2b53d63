"""Actor processes of one run on a real NATS server, and waiting for what they publish."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from actors.runtime.actor import Context
from asyncrl.bus.connection import Bus
from asyncrl.bus.logins import save_logins
from asyncrl.bus.permissions import login_roles
from asyncrl.bus.provision import equal_sizes, provision
from asyncrl.bus.publish import publish
from asyncrl.bus.server import EmbeddedServer
from asyncrl.config.settings import Config
from asyncrl.process import ChildProcess
from asyncrl.run.directory import RunFiles
from asyncrl.run.opening import run_opened
from asyncrl.run.placement import actor_job
from asyncrl.run.placements.local import LocalProcesses
from asyncrl.run.user_actors import load_actors
from asyncrl.telemetry.logs import open_log
from asyncrl.training.init_model import create_model

LEASE_S = 1.0
DEADLINE_S = 100.0  # for what has to come before a default deadline of the product, which is longer
LONGEST_S = 300.0  # for whatever else comes: a loaded machine takes many times as long as an idle one
Connect = Callable[..., Awaitable[Bus]]
Unretrieved = Callable[[], list[str]]  # faults of tasks that nobody looked at


async def provision_leased(bus: Bus, lease_s: float) -> None:
    """Make the streams and queues of a run, or give the queues another lease: the one that its workers renew."""
    await provision(bus, equal_sizes(payload_mb=64, ledger_mb=16, tables=bus.tables), lease_s=lease_s)


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, deadline_s: float = LONGEST_S) -> None:
    """Wait for something that nothing announces; fail aloud with what was waited for."""
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                began = time.monotonic()
                held = condition()
                if held if isinstance(held, bool) else await held:
                    return
                await asyncio.sleep(max(0.01, time.monotonic() - began))  # looking takes half of the time at most
    except TimeoutError:
        pytest.fail(f"not within {deadline_s:.0f} s: {what}")


class Stage:
    """A run directory on a living server, and the actor processes that play in it."""

    def __init__(self, root: Path, server: EmbeddedServer, config: Config) -> None:
        self.files = RunFiles(root)
        self.config = config
        self.files.logs.mkdir(parents=True)
        self.files.config.write_bytes(msgspec.json.encode(config))
        (root / "base").write_text(str(root))
        self.files.make_engine_key()
        server.address.save(self.files.address)
        roles = login_roles(load_actors(config.actors, root))
        save_logins(dict.fromkeys(roles, server.address), self.files.credentials)
        self._address = server.address
        self._opened = False
        self._processes: list[ChildProcess] = []

    def make_model(self) -> None:
        """The untrained model that the config describes."""
        create_model(self.files.model, alphabet=self.config.model.create.alphabet, seed=self.config.seed)

    def context(self, role: str, bus: Bus) -> Context:
        """Return the context of an actor of this run inside the test's own process."""
        credentials = self.files.credentials / f"{role}.json"
        log = open_log(actor=f"{role}-1")
        return Context(role, f"{role}-1", self.config, self.files, bus, log, credentials)

    async def open(self) -> None:
        """Publish the settings for actors in processes of their own."""
        if not self._opened:
            self._opened = True
            bus = await Bus.connect(self._address, self.config.run)
            await publish(bus, run_opened(self.config, self.files))
            await bus.close()

    async def start(self, role: str, number: int = 1) -> ChildProcess:
        """Start an actor process: `python -m actors.main ROLE ROLE-NUMBER`."""
        await self.open()
        job = actor_job(self.files.credentials, self.config.run, role, f"{role}-{number}")
        process = await LocalProcesses(self.files.logs).start(job)
        self._processes.append(process)
        return process

    async def stop(self) -> None:
        """End every process that still runs."""
        for process in self._processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
