"""Real parts for tests: a NATS server, a provisioned run on it, actor processes that are stopped whatever happens."""

import asyncio
import contextlib
import gc
import os
import secrets
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.server import EmbeddedServer
from asyncrl.config.settings import Config
from harness import forks
from harness.own_ports import take_own_ports
from harness.servers import Authority
from harness.stage import LEASE_S, Connect, Stage, Unretrieved, provision_leased
from topics.table import BUILT_IN, Tables

_ENDING_S = 5.0  # for processes that were told to end
_COMPILING_S = 90.0  # the other workers wait no longer
_ports = take_own_ports()  # held for as long as this process runs

gc.disable()  # until all tests are imported: passes of the collector over what that makes are a third of its time


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let the processes of tests be forked; in a worker the server imports while the tests are collected."""
    server = forks.ForkServer(os.environ)
    if hasattr(session.config, "workerinput"):
        server.start()
    forks.install(server)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """In a new checkout the first worker compiles all tests; the others wait, and read its files."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode or [*Path(__file__).parent.glob("__pycache__/test_layout.*.pyc")]:
        return (yield)
    compiled = Path(tempfile.gettempdir(), f"asyncrl-compiled-{worker['testrunuid']}")
    until_s = time.monotonic() + _COMPILING_S
    while worker["workerid"] != "gw0" and not compiled.exists() and time.monotonic() < until_s:
        time.sleep(0.1)
    try:
        return (yield)
    finally:
        if worker["workerid"] == "gw0":
            compiled.touch()
            session.config.add_cleanup(compiled.unlink)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Start the processes of a test with the marker `real_start` as a user does."""
    server = forks.installed()
    if item.get_closest_marker("real_start"):
        forks.install(None)
    try:
        return (yield)
    finally:
        forks.install(server)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with whole runs first: files of quick tests then keep every worker busy to the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Collect garbage again, but not among what was imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Reap and name the processes that a file leaves behind: its neighbours would find them among theirs."""
    yield
    if nextitem is None or nextitem.path != item.path:
        until_s = time.monotonic() + _ENDING_S
        while (left := left_processes()) and time.monotonic() < until_s:
            time.sleep(0.02)
        if left:
            warnings.warn(f"tests of {item.path.name} left processes behind: {left}", stacklevel=1)


def left_processes() -> list[str]:
    """Command lines of the children that live, but for those that serve all files; the dead are reaped.

    Those that serve all are the ranks' server (`harness/ranks.py`), and what the standard library and torch start once.
    """
    lasting = ("harness.forks", "harness.ranks", "multiprocessing", "torch_shm_manager")
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ChildProcessError, FileNotFoundError, ProcessLookupError):  # it ended in this moment
            for pid in map(int, (thread / "children").read_text().split()):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found += [line] if not any(name in line for name in lasting) else []
    return found


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    """Writes a config of this text; the returned function gives its path."""

    def write(text: str) -> str:
        path = tmp_path / "config.toml"
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
def tables() -> Tables:
    """The tables of the run that `bus` is connected to; tests of users' actors override it."""
    return BUILT_IN


@pytest.fixture
async def bus(connect: Connect, tables: Tables) -> Bus:
    """A connection to a provisioned run with a unique id."""
    bus = await connect(f"t-{secrets.token_hex(4)}")
    bus.tables = tables
    await provision_leased(bus, LEASE_S)
    return bus


@pytest.fixture
async def stage(bus: Bus, server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Callable[..., Stage]]:
    """Makes the stage of the run that `bus` is connected to; arguments are the config's tables."""
    made: list[Stage] = []

    def make(**tables: object) -> Stage:
        config = msgspec.convert({"run": bus.run, **tables}, Config)
        made.append(Stage(tmp_path / f"run-{len(made)}", server, config))
        return made[-1]

    yield make
    for stage in made:
        await stage.stop()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by the openssl program, which is not installed")
    return Authority(tmp_path / "autorité '测试'")


@pytest.fixture
async def unretrieved() -> Unretrieved:
    """Returns the faults of tasks and futures that nobody retrieved: asyncio reports them when they are collected."""
    found: list[str] = []

    def note(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        found.append(f"{context['message']}: {context.get('exception')!r}")

    asyncio.get_running_loop().set_exception_handler(note)

    def all_of_them() -> list[str]:
        gc.collect()
        tasks = [task for task in gc.get_objects() if type(task) is asyncio.Task]
        return found + [repr(task) for task in tasks if task.done() and task._log_traceback]

    return all_of_them
