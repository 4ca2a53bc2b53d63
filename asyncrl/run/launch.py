"""Bringing a run up on this machine: its directory, its model, its NATS server, its supervisor, and keeping it up."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from asyncrl.background import BackgroundTasks, on_daemon_thread
from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError, BusUnreachable
from asyncrl.bus.layout import layout_of
from asyncrl.bus.liveness import Liveness
from asyncrl.bus.logins import given_logins, numbered, save_logins
from asyncrl.bus.provision import is_provisioned, provision
from asyncrl.bus.server import EmbeddedServer, OwnServer, own_server
from asyncrl.config.load import LoadedConfig
from asyncrl.config.settings import Config
from asyncrl.config.stream_capacity import store_limit
from asyncrl.errors import DamagedFile, LaunchError
from asyncrl.files import write_json
from asyncrl.locks import lock, lock_folder
from asyncrl.own_code import use_copies
from asyncrl.ports import Listen
from asyncrl.process import DENIED, FATAL, RestartPolicy, cpu_wait_s
from asyncrl.run.connect import RECOVER_S, SUPERVISOR
from asyncrl.run.directory import RunFiles, is_locked, reader_of
from asyncrl.run.first_keys import add_first_keys
from asyncrl.run.gateway_port import held_gateway, with_gateway_socket
from asyncrl.run.inputs import NOTHING, take_inputs
from asyncrl.run.opening import open_run
from asyncrl.run.placement import Placed, actor_job, open_placement
from asyncrl.run.previous_session import PartBefore
from asyncrl.run.resume import longer, request_skip
from asyncrl.run.sizing import provision_sized
from asyncrl.run.user_actors import run_tables
from asyncrl.training.init_model import create_configured
from topics.roles import OPERATOR

_ENDED_S = 5.0  # after which the kernel has killed what an `up` that was killed had started
_STOP_S = 90.0  # for the supervisor to stop all actors
_INFO_S = 2.0  # for a server to send INFO to a new connection
_ROOM_BYTES = 64 * 2**20  # on a disk that was full, before a server writes again


class Launch:
    """A run on this machine, from its preparation to its end: a new or a resumed one."""

    def __init__(self, loaded: LoadedConfig, resumes: Path | None = None) -> None:
        self.config = loaded.config
        self.base = loaded.base
        self.files = RunFiles(resumes or Path())
        self.address = BusAddress("")
        self.failure, self.killed = "", False  # why the run could not be kept up
        self.skip_batch: int | None = None  # of a resumed run: this batch ends untrained
        self.accepted = NOTHING  # changed inputs of a resumed run
        self.changes: list[str] = []  # of the inputs since it began, a line for each
        self.trained = self.config.origin  # newest step trained before the start
        self.report: Callable[[str], None] = lambda _: None  # called with deaths that no topic reports
        self._resumes = resumes is not None  # it is the directory of the resumed run
        self._server: OwnServer | None = None
        self._supervisor: Placed | None = None
        self._gateway: socket.socket | None = None  # has its port
        self._leaving = asyncio.Event()
        self._over: asyncio.Future[int] | None = None
        self._keeping = BackgroundTasks(self._on_fault)  # without them there is no run
        self._before: PartBefore | None = None  # where its end was taken away
        self._lock = -1
        self._sizes: dict[str, int] = {}  # bytes that each stream may hold

    @classmethod
    def of(cls, root: Path, overrides: Sequence[str]) -> Launch:
        """Return what continues the run of a directory, with the settings it began with.

        Args:
            root: absolute.
            overrides: as for `longer`.

        Raises:
            LaunchError: it has finished, or cannot resume with these settings.
        """
        files = RunFiles(root)
        try:
            config, base = files.read_config(), files.base
        except (DamagedFile, FileNotFoundError) as error:
            raise LaunchError(f"run {root.name} cannot go on: {error}") from error
        wanted = longer(config, overrides, base=base)
        if files.read_summary().get("finished") and wanted.learner.steps == config.learner.steps:
            raise LaunchError(
                f"run {root.name} has finished, nothing is left to do; its results are in {root}. To train it further: "
                f"asyncrl up --resume {root.name} --set learner.steps=N, with N above {config.learner.steps}"
            )
        return cls(LoadedConfig(wanted, base, files.config), root)

    def prepare(self) -> None:
        """Take a new run directory with the settings in it, or that of the run that is resumed.

        A run that has ended keeps its directory; the next of that name is called `demo-2`, and so on.

        Raises:
            LaunchError: a run of this name is running.
        """
        folder = self.files.root.parent if self._resumes else Path(self.config.directory).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        turn = lock_folder(folder)  # two at once look one after the other
        try:
            if not self._resumes:
                self._take_directory(folder)
            self._lock_directory()
        finally:
            os.close(turn)
        (self.files.root / "base").write_text(str(self.base.absolute()), encoding="utf-8")
        self.files.make_engine_key()
        self.changes = take_inputs(self.files.root, self.config, self.base, self.accepted)
        if not self._resumes:
            self._write_config()

    def begin_with(self, checkpoint: Path) -> None:
        """Let training begin with a checkpoint, whose step the settings have."""
        start = msgspec.structs.replace(self.config.start, checkpoint=str(checkpoint))
        self.config = msgspec.structs.replace(self.config, start=start)
        self._write_config()

    def _write_config(self) -> None:
        write_json(self.files.config, self.config)

    def _take_directory(self, root: Path) -> None:
        for name in numbered(self.config.run):
            if not (root / name).exists():
                break
            if is_locked(root / name):
                raise LaunchError(
                    f"run {name} is already running in {root / name}; watch it with `asyncrl status {name}`, end it "
                    f"with `asyncrl down {name}`, or give this one another id: --set run=NAME"
                )
        self.config = msgspec.structs.replace(self.config, run=name)
        self.files = RunFiles(root / name)
        self.files.logs.mkdir(parents=True)
        self.files.location.write_text(str(self.files.root.resolve()), encoding="utf-8")

    def _lock_directory(self) -> None:
        root = self.files.root
        if is_locked(root):
            raise LaunchError(
                f"run {root.name} is running; watch it with `asyncrl status {root.name}`, end it with `asyncrl down "
                f"{root.name}`"
            )
        self._lock = lock(root / "lock")  # a reader that comes from here on leaves the store alone
        if reader := reader_of(root):
            os.close(self._lock)
            self._lock = -1
            raise LaunchError(f"{reader} reads run {root.name}; wait until it has ended, or end it")

    async def start(self) -> Bus:
        """Start the server if none is given, provision the topics, make the model, start the supervisor.

        From then on server and supervisor are started again when they die.

        Raises:
            BusError: no server, or not one that can hold the run.
            LaunchError: the run is not on that server, a new one's id is taken there, the model was not made, another
                program has the gateway's port, or the batch to be skipped does not wait to be trained.
        """
        use_copies(self.files.root)
        self._tables = run_tables(self.config, self.base)
        making = asyncio.create_task(self._make_model())
        async with AsyncExitStack() as failed:
            failed.callback(making.cancel)
            await self._reach_server()
            self.config, self._gateway = await held_gateway(self.config, _ENDED_S if self._resumes else 0.0)
            bus = await Bus.connect(self.address, self.config.run, name="up")
            bus.tables = self._tables
            failed.push_async_callback(bus.close)
            await self._check_owner(bus)
            self._sizes = await provision_sized(bus, self.config, self.base, self.files.root)
            await making
            if self.skip_batch is not None:
                await request_skip(bus, self.config.origin, self.skip_batch)
            # Refused settings do not change a resumed run.
            self._write_config()
            self._before = PartBefore(self.files)
            self._before.take_away()
            self.trained = await open_run(bus, self.config, self.files)
            await add_first_keys(bus, self.config.gateway.tenants, self.files)
            await self._start_supervisor()
            failed.pop_all()
        self._over = asyncio.get_running_loop().create_future()
        liveness = Liveness(
            bus,
            self.config.supervision.silence_s,
            self._on_silent,
            on_starved=lambda _: self.report("the supervisor is silent: starved, it waits for a CPU"),
            waited_s=lambda _: cpu_wait_s(self._supervisor.pid) if self._supervisor is not None else 0.0,
        )
        self._keeping.start(self._keep_supervisor(liveness))
        self._keeping.start(liveness.watch())
        for server in self._server.nodes if self._server is not None else []:
            self._keeping.start(self._keep_server(server))
            self._keeping.start(self._watch_server(server))
        return bus

    async def ended(self) -> int:
        """Wait for the run to end; returns its supervisor's last exit code, or 1 with a `failure`."""
        assert self._over is not None
        return await asyncio.shield(self._over)

    async def dismiss(self) -> int:
        """Stop all actors; returns the supervisor's exit code."""
        assert self._supervisor is not None
        self._leaving.set()
        self._supervisor.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                code = await self._supervisor.wait()
            return 0 if code == -signal.SIGTERM else code  # it was still being imported, and had started nothing
        except TimeoutError:
            self.kill()
            return await self._supervisor.wait()

    def kill(self) -> None:
        """End all processes at once: the kernel kills the actors with their supervisor."""
        self.killed = True
        self._kill_supervisor()

    async def stop(self) -> None:
        """Stop the actors that are still there, then the server."""
        if self._supervisor is not None:
            await self.dismiss()
        if self._before is not None and (self._supervisor is None or self._supervisor.returncode == -signal.SIGTERM):
            self._before.put_back()  # no actor was started
        self._keeping.cancel()
        if self._server is not None:
            await self._server.stop()
        if self._gateway is not None:
            self._gateway.close()
        if self._lock >= 0:
            os.close(self._lock)

    def _on_silent(self, actor_id: str) -> None:
        """Watch the supervisor: one without vital signs is frozen. It watches all others itself."""
        living = self._supervisor is not None and self._supervisor.returncode is None
        if actor_id == SUPERVISOR and self._supervisor is not None and living and not self._leaving.is_set():
            self.report("the supervisor is silent; killed")
            self._supervisor.kill()

    async def _watch_server(self, server: EmbeddedServer) -> None:
        """Kill a server that accepts connections but does not send INFO: it is frozen."""
        silence_s = self.config.supervision.silence_s
        seen_at = time.monotonic()
        while True:
            began = time.monotonic()
            await asyncio.sleep(silence_s / 4)
            answers = not server.ready or await server.answers(_INFO_S)
            now = time.monotonic()
            if answers or now - began > silence_s / 2 + _INFO_S:  # the latter: this process itself was stopped
                seen_at = now
            elif now - seen_at > silence_s:
                self.report("the NATS server does not answer; killed")
                server.kill()
            if server.refuses_writes and server.ready and shutil.disk_usage(server.directory).free > _ROOM_BYTES:
                self.report("the disk of the NATS server was full, and has room again; killed")
                server.kill()

    @property
    def supervisor_end(self) -> str:
        """Return how the supervisor ended, with the last lines of its log."""
        return self._supervisor.end_text if self._supervisor is not None else "no start"

    def _kill_supervisor(self) -> None:
        self._leaving.set()
        if self._supervisor is not None:
            self._supervisor.kill()

    async def _reach_server(self) -> None:
        if (nats := self.config.nats).url:
            try:
                logins = given_logins(nats, self.base, self._tables)
            except (OSError, ValueError) as error:
                raise LaunchError(f"nats: {error}") from error
            self.address = logins[OPERATOR]
            self.address.save(self.files.address)
            save_logins(logins, self.files.credentials)
        else:
            listen, websocket = Listen(nats.host, nats.port), nats.websocket != "off"
            server = own_server(self.files.root, self.config.run, nats.servers, listen, self._tables, websocket)
            self._server, server.most_bytes = server, store_limit(nats)
            self.address = await server.start(RECOVER_S)

    async def _check_owner(self, bus: Bus) -> None:
        """The server must hold a resumed run, and no run with a new one's id; its own server, once it has trained."""
        begins = not self.config.nats.url and not (self._resumes and self.files.newest_steps())
        if begins or await is_provisioned(bus) == self._resumes:
            return
        where = f"the server {f'at {self.config.nats.url}' if self.config.nats.url else f'in {self.files.root}'}"
        if self._resumes:
            raise LaunchError(f"{where} holds no run called {self.config.run}; without its topics it cannot continue")
        raise LaunchError(
            f"{where} already holds a run called {self.config.run}; give this one another id: --set run=NAME"
        )

    def _on_fault(self, error: BaseException) -> None:
        self._give_up(f"it could not be kept up: {type(error).__name__}: {error}")

    async def _keep_supervisor(self, liveness: Liveness) -> None:
        """Start the supervisor again whenever it dies; the fleet is on its log, the dead one's actors died with it."""
        assert self._supervisor is not None and self._over is not None
        restarts = RestartPolicy(self.config.supervision)
        liveness.begin(SUPERVISOR)
        while (code := await self._supervisor.wait()) not in (0, FATAL, DENIED) and not self._leaving.is_set():
            liveness.end(SUPERVISOR)
            restarts.add()
            if restarts.should_give_up:
                times = f"{restarts.count} times in a row"
                self._give_up(f"the supervisor died {times}, at last with {self.supervisor_end}")
                return
            await restarts.pause()
            if self._leaving.is_set():
                return
            liveness.begin(SUPERVISOR)
            await self._start_supervisor()
            if self._leaving.is_set():
                self._supervisor.terminate()
        if not self._over.done():
            self._over.set_result(code)

    async def _keep_server(self, server: EmbeddedServer) -> None:
        """Start the server again whenever it dies, on the same port and store; actors wait for it."""
        restarts, words = RestartPolicy(self.config.supervision), ""
        while True:
            if not words:
                words = f"exit code {await server.ended()}"
            restarts.add()
            if restarts.should_give_up:
                log = server.directory / "nats.log"
                self._give_up(f"the NATS server died {restarts.count} times in a row, at last with {words}; see {log}")
                return
            self.report(f"the NATS server died: {words}; it is started again")
            await restarts.pause()
            try:
                await server.start(RECOVER_S)
                words = ""
            except BusUnreachable as error:
                words = str(error)
            else:
                await self._provision_again()

    async def _provision_again(self) -> None:
        """Make the streams again that lived in the server's memory."""
        try:
            bus = await Bus.connect(self.address, self.config.run, name="up again")
            bus.tables = self._tables
            try:
                lease_s, layout = self.config.workers.lease_s, layout_of(self.config.nats)
                await provision(bus, self._sizes, lease_s=lease_s, layout=layout)
            finally:
                await bus.close()
        except BusError as error:
            self.report(f"after its return the NATS server lacks topics: {error}")

    def _give_up(self, reason: str) -> None:
        assert self._over is not None
        self.failure = reason
        self._kill_supervisor()
        if not self._over.done():
            self._over.set_result(1)

    async def _make_model(self) -> None:
        if self.config.model.path or self.files.model.exists():
            return
        aside = self.files.model.with_name("model.partial")
        shutil.rmtree(aside, ignore_errors=True)  # of an `up` that was killed
        await make_model(aside, self.config)
        aside.rename(self.files.model)

    async def _start_supervisor(self) -> None:
        job = actor_job(self.files.credentials, self.config.run, "supervisor", SUPERVISOR, apart=True)
        job = with_gateway_socket(job, self._gateway)
        self._supervisor = await open_placement(self.config, self.files).start(job)


async def make_model(directory: Path, config: Config) -> None:
    """Make the untrained model that a config describes, on a thread.

    Raises:
        LaunchError: it could not be made.
    """
    try:
        await on_daemon_thread(create_configured, directory, config)
    except (OSError, ValueError) as error:
        raise LaunchError(f"the model could not be made: {error}") from error
