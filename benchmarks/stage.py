"""A stage for measurements: one run's server and its real actors as child processes, in a temporary directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from actors.supervisor.actor import first_fleet
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.provision import equal_sizes, provision, queue_states
from asyncrl.bus.publish import publish
from asyncrl.bus.server import EmbeddedServer
from asyncrl.config.renamed import read_settings
from asyncrl.config.settings import Config
from asyncrl.errors import AsyncRLError
from asyncrl.ports import free_port
from asyncrl.process import ChildProcess, python, with_parent
from asyncrl.run.directory import RunFiles
from asyncrl.run.opening import run_opened
from asyncrl.run.placement import actor_job
from asyncrl.run.placements.local import LocalProcesses
from topics.engines import ENGINE_READY
from topics.roles import role_of
from topics.topic import BATCHES, ENGINES, TRAINING, Stream, Topic

T = TypeVar("T")

SERVER = "nats-server"
ROOMY = equal_sizes(payload_mb=4096, ledger_mb=4096)  # sizes of streams
_LEAVE_S = 10.0
_BEGAN = time.monotonic()


class BenchError(AsyncRLError):
    """A measurement failed."""


class Stage:
    """A run without a supervisor: the benchmark starts each actor, and is notified when one fails."""

    def __init__(self, root: Path, config: Config) -> None:
        self.config = config
        self.files = RunFiles(root)
        self._server = EmbeddedServer(root, run=config.run)
        self._actors: dict[str, ChildProcess] = {}
        self._watching: set[asyncio.Task[None]] = set()
        self._fallen: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._leaving = False
        self.bus: Bus

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, config: Config) -> AsyncIterator[Stage]:
        """Open a stage for the length of the block; its end stops and removes everything."""
        with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True) as directory:
            stage = cls(Path(directory), config)
            try:
                await stage._prepare()
                yield stage
            finally:
                await stage._close()

    async def enter_all(self, *, but: Iterable[str] = ("prompter",), deadline_s: float = 600.0) -> None:
        """Start all actors of the config except some roles, and return once all are ready for prompts."""
        fleet = first_fleet(self.config)
        for pool, count in fleet.items():
            if role_of(pool) not in but:
                for number in range(1, count + 1):
                    await self.enter(pool, number)
        engines = sum(count for pool, count in fleet.items() if role_of(pool) == "engine")
        await self.until(self._seen(ENGINES, ENGINE_READY, engines), deadline_s)
        await self.until(self._pulled({"rollout", "reward"} - set(but)), deadline_s)

    async def enter(self, pool: str, number: int = 1) -> None:
        """Start one actor."""
        name = f"{pool}-{number}"
        job = actor_job(self.files.credentials, self.config.run, role_of(pool), name)
        process = self._actors[name] = await LocalProcesses(self.files.logs).start(job)
        task = asyncio.create_task(self._watch(name, process))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def open_again(self, **tables: dict[str, Any]) -> None:
        """Open the run with other settings, which apply to actors that start later.

        Args:
            tables: the settings that change, as TOML has them.
        """
        settings = msgspec.to_builtins(self.config)
        changed = {name: settings[name] | table for name, table in tables.items()}
        self.config = read_settings(settings | changed)
        await publish(self.bus, run_opened(self.config, self.files))

    async def leave(self, pool: str, number: int = 1) -> None:
        """End one actor, and return when it has given its work back."""
        process = self._actors.pop(f"{pool}-{number}")
        process.terminate()
        async with asyncio.timeout(_LEAVE_S):
            await process.wait()

    async def until(self, event: Awaitable[T], deadline_s: float) -> T:
        """Wait for an event, unless an actor fails or the time runs out.

        Raises:
            BenchError: an actor failed, or the time ran out.
        """
        task = asyncio.ensure_future(event)
        waits: set[asyncio.Future[Any]] = {task, self._fallen}
        try:
            await asyncio.wait(waits, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            task.cancel()
        words = self._fallen.result() if self._fallen.done() else f"nothing happened within {deadline_s:.0f} s"
        raise BenchError(f"run {self.config.run}: {words}")

    async def read(self, stream: Stream, topics: Iterable[Topic[Any]]) -> list[Record]:
        """Return all messages published on some topics of a stream so far."""
        records: list[Record] = []
        subjects = [topic.pattern(self.config.run) for topic in topics]
        reader = LogReader(self.bus, stream, records.append, subjects=subjects)
        await reader.start()
        async with asyncio.timeout(60):
            await reader.caught_up.wait()
        await reader.close()
        return records

    async def follow(self, stream: Stream, topic: Topic[Any], wanted: Callable[[Record], bool]) -> Record:
        """Return the first record of a topic, old or new, that is `wanted`."""
        found: asyncio.Future[Record] = asyncio.get_running_loop().create_future()

        def on_record(record: Record) -> None:
            if not found.done() and wanted(record):
                found.set_result(record)

        reader = LogReader(self.bus, stream, on_record, subjects=[topic.pattern(self.config.run)])
        await reader.start()
        try:
            return await found
        finally:
            await reader.close()

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of every actor (with its children) and of the server, since each began."""
        return {name: sum(map(cpu_s, tree)) for name, tree in self._trees().items()}

    def cpu_s_of(self, words: str) -> float:
        """Return the CPU seconds of the processes with these words in their command line, since each began."""
        trees = self._trees().values()
        return sum(cpu_s(process) for tree in trees for process in tree if words in _line_of(process))

    def waited_s(self) -> dict[str, float]:
        """Return the seconds for which the same processes had work but no core (Linux)."""
        return {name: sum(map(_waited_s, tree)) for name, tree in self._trees().items()}

    def _trees(self) -> dict[str, list[psutil.Process]]:
        assert self._server.process is not None
        processes = {name: process.pid for name, process in self._actors.items() if process.returncode is None}
        processes[SERVER] = self._server.process.pid
        found = {name: psutil.Process(pid) for name, pid in processes.items()}
        return {name: [process, *process.children(recursive=True)] for name, process in found.items()}

    async def _prepare(self) -> None:
        gateway = msgspec.structs.replace(self.config.gateway, port=self.config.gateway.port or free_port())
        self.config = msgspec.structs.replace(self.config, gateway=gateway)
        self.files.logs.mkdir(parents=True)
        self.files.config.write_bytes(msgspec.json.encode(self.config))
        (self.files.root / "base").write_text(str(self.files.root))
        self.files.make_engine_key()
        address = await self._server.start()
        self.bus = await Bus.connect(address, self.config.run, name="bench")
        await provision(self.bus, ROOMY, lease_s=self.config.workers.lease_s)
        await publish(self.bus, run_opened(self.config, self.files))

    async def _seen(self, stream: Stream, topic: Topic[Any], count: int) -> None:
        seen: list[Record] = []

        def enough(record: Record) -> bool:
            seen.append(record)
            return len(seen) >= count

        await self.follow(stream, topic, enough)

    async def _pulled(self, roles: Iterable[str]) -> None:
        """Return once the workers of these roles wait for work and the keepers hold their logs."""
        workers = {"rollout": self.config.rollout.workers, "reward": self.config.reward.workers}
        while True:
            states = await queue_states(self.bus)
            claims = [
                await self.bus.api(f"STREAM.INFO.{log.full_name(self.config.run)}") for log in (BATCHES, TRAINING)
            ]
            waiting = all(states[role]["pulls"] >= workers[role] for role in roles)
            if waiting and all(info["state"]["messages"] for info in claims):
                return
            await asyncio.sleep(0.05)  # the server announces no waiting pull

    async def _watch(self, name: str, process: ChildProcess) -> None:
        code = await process.wait()
        finished = code == 0 and name.startswith("learner")
        left = self._leaving or self._actors.get(name) is not process
        if not (left or finished or self._fallen.done()):
            words = (self.files.logs / f"{name}.log").read_text(errors="replace").strip().splitlines()[-3:]
            self._fallen.set_result(f"{name} ended with code {code}: {' / '.join(words) or 'no output'}")

    async def _close(self) -> None:
        self._leaving = True
        for process in self._actors.values():
            if process.returncode is None:
                process.terminate()
        if self._watching:
            await asyncio.wait(self._watching, timeout=_LEAVE_S)
        for process in self._actors.values():
            if process.returncode is None:
                process.kill()
                await process.wait()
        if hasattr(self, "bus"):
            await self.bus.close()
        await self._server.stop()


def bench_config(run: str, *, learner: dict[str, Any], **tables: Any) -> Config:
    """Return the config of a measurement, with nothing to learn and no random choices.

    Args:
        run: its id.
        learner: learner settings other than the trainer.
        tables: the other tables, as TOML has them.
    """
    fixed = {"run": run, "learner": {"trainer": "scripted", **learner}, "recorder": {"plot": False}}
    return msgspec.convert({**tables, **fixed}, Config)


async def start_asyncrl(folder: Path | str, *words: str) -> asyncio.subprocess.Process:
    """Start `asyncrl WORDS` in a folder; its output goes to its `stdout`, and it ends with this process."""
    return await asyncio.create_subprocess_exec(
        *python("-m", "asyncrl.cli.main", *words),
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        preexec_fn=with_parent(),
    )


def report(line: str) -> None:
    """Report the progress of a measurement on stderr; stdout is for its figures."""
    print(f"{time.monotonic() - _BEGAN:6.1f} s  {line}", file=sys.stderr, flush=True)


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process since it began; 0 if it has ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _line_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def _waited_s(process: psutil.Process) -> float:
    try:
        threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[1]) for thread in threads) / 1e9
    except OSError:  # the process has ended, or the kernel does not report it
        return 0.0
