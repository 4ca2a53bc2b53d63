"""Real parts for tests: a NATS server, a provisioned run on it, actor processes that are stopped whatever happens."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from actors.actor import Context, RunFiles, start_actor
from asyncrl.bus.connection import Bus
from asyncrl.bus.logins import save_logins
from asyncrl.bus.permissions import ROLES
from asyncrl.bus.provision import equal_sizes, provision
from asyncrl.bus.server import EmbeddedServer
from asyncrl.settings import Cast
from asyncrl.telemetry.logs import open_log

LEASE_S = 1.0
DEADLINE_S = 60.0  # no wait of a test is longer; a loaded machine takes many times as long as an idle one

Connect = Callable[..., Awaitable[Bus]]


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for something that nothing announces; fail aloud with what was waited for."""
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                held = condition()
                if held if isinstance(held, bool) else await held:
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"not within {deadline_s:.0f} s: {what}")


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    """Writes a cast of this text; the returned function gives its path."""

    def write(text: str) -> str:
        path = tmp_path / "cast.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """A NATS server of this test alone, its store under `tmp_path`."""
    server = EmbeddedServer(tmp_path / "server")
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
async def connect(server: EmbeddedServer) -> AsyncIterator[Connect]:
    """Makes connections to the server; they are closed when the test ends."""
    opened: list[Bus] = []

    async def connect(run: str, *, name: str = "", publish_deadline_s: float = 20.0) -> Bus:
        bus = await Bus.connect(server.address, run, name=name, publish_deadline_s=publish_deadline_s)
        opened.append(bus)
        return bus

    yield connect
    for bus in opened:
        await bus.close()


@pytest.fixture
async def bus(connect: Connect) -> Bus:
    """A connection to a provisioned run with an id of its own."""
    bus = await connect(f"t-{secrets.token_hex(4)}")
    await provision(bus, equal_sizes(payload_mb=64, ledger_mb=16), lease_s=LEASE_S)
    return bus


class Stage:
    """A run directory on a living server, and the actor processes that play in it."""

    def __init__(self, root: Path, server: EmbeddedServer, cast: Cast) -> None:
        self.files = RunFiles(root)
        self.cast = cast
        self.files.logs.mkdir(parents=True)
        self.files.cast.write_bytes(msgspec.json.encode(cast))
        (root / "base").write_text(str(root))
        self.files.make_engine_key()
        server.address.save(self.files.address)
        save_logins(dict.fromkeys(ROLES, server.address), self.files.credentials)
        self._processes: list[asyncio.subprocess.Process] = []

    def make_model(self) -> None:
        """The untrained model that the cast describes."""
        from asyncrl.training.create import create_model  # loads torch, which most tests do without

        create_model(self.files.model, alphabet=self.cast.model.create.alphabet, seed=self.cast.seed)

    def context(self, role: str, bus: Bus) -> Context:
        """What an actor of this run is given when it plays inside the test's own process."""
        return Context(role, f"{role}-1", self.cast, self.files, bus, open_log(actor=f"{role}-1"))

    async def start(self, role: str, number: int = 1) -> asyncio.subprocess.Process:
        """Start an actor process: `python -m actors.main ROLE ROLE-NUMBER RUN_DIR`."""
        process = await start_actor(self.files, role, f"{role}-{number}")
        self._processes.append(process)
        return process

    async def stop(self) -> None:
        """End every process that still runs."""
        for process in self._processes:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.fixture
async def stage(bus: Bus, server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Callable[..., Stage]]:
    """Makes the stage of the run that `bus` is connected to; arguments are the cast's tables."""
    made: list[Stage] = []

    def make(**tables: object) -> Stage:
        cast = msgspec.convert({"run": bus.run, **tables}, Cast)
        made.append(Stage(tmp_path / f"run-{len(made)}", server, cast))
        return made[-1]

    yield make
    for stage in made:
        await stage.stop()
