"""Placement on the hosts of a Ray cluster: a bundle for each process, and a host in it that starts the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.background import BackgroundTasks
from asyncrl.config.engine_settings import Capability
from asyncrl.config.settings import Config
from asyncrl.files import append_private
from asyncrl.process import log_tail
from asyncrl.run.directory import RunFiles
from asyncrl.run.host_files import USES_MODEL, Parcel, send_model
from asyncrl.run.placement import LOST, Job, NoRoom, Placed
from asyncrl.run.placements.local import LocalProcesses
from asyncrl.run.placements.ray.cluster import HostFailed, HostLost, RayCluster, Seat
from asyncrl.run.placements.ray.host import News, installed
from topics.roles import pool_of, role_of

_ROOM_S = 5.0  # for a node to have room, before the process is reported as one that waits
_START_S = 120.0  # for a host to start in its bundle, and for each thing that it is sent
_HEAD_S = 1.0  # between two looks at the head of the cluster
_KEPT_S = 5.0  # beyond the pause of its actor, for a bundle to be taken again
_KILL_S = 5.0  # for a host to report the end of a process that it was asked to kill


def bundle_of(config: Config, actor_id: str) -> dict[str, float]:
    """Return what a process reserves on its host."""
    given, pool = config.placement.bundles, pool_of(actor_id)
    if found := given.get(pool) or given.get(role_of(actor_id)):
        return dict(found)
    gpus = 0
    if role_of(actor_id) == "engine" and config.engine.group_of(actor_id).on_gpus:
        gpus = config.engine.group_of(actor_id).gpus_needed
    elif role_of(actor_id) == "learner" and config.learner.device.startswith("cuda"):
        gpus = config.learner.ranks
    return {"CPU": 1.0, **({"GPU": float(gpus)} if gpus else {})}


def run_key(run: str, files: RunFiles) -> str:
    """Return the name of a run, unique among all runs on a host."""
    return f"{run}-{xxhash.xxh3_64_hexdigest(os.fsencode(files.root.absolute()))[:8]}"


def is_placed(config: Config, actor_id: str) -> bool:
    """Return whether Ray chooses the host of an actor; other actors run on this machine."""
    role = role_of(actor_id)
    own = role != "engine" or config.engine.group_of(actor_id).can(Capability.PROCESSES)
    return role in config.placement.roles and own


def bundle_text(bundle: dict[str, float]) -> str:
    """`{CPU: 1, GPU: 2}`."""
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in sorted(bundle.items())) + "}"


class RayProcess:
    """A process in a bundle. If its host does not answer, it counts as killed although it may live: the fence refuses
    its later writes, and Ray ends it when it finds its node again.
    """

    def __init__(self, seat: Seat, pid: int, log: Path, over: Callable[[RayProcess], None]) -> None:
        self.seat = seat
        self.pid = pid
        self.lost = ""  # why its host counts as lost
        self.asked = False  # it was asked to leave, or killed, from here
        self._log = log  # gets its output; files next to it get the output of its child processes
        self._logged = log.stat().st_size if log.exists() else 0
        self._over = over  # called with its end
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tasks = BackgroundTasks(lambda error: self._end(LOST, f"{type(error).__name__}: {error}"))
        self._tasks.start(self._follow())

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for the signal that ended it; None while it lives."""
        return self._ended.result() if self._ended.done() else None

    @property
    def end_text(self) -> str:
        """Describe how it ended, with the last lines of its log."""
        if self.lost:
            return f"its host is lost: {self.lost}"
        code = self.returncode
        return f"exit code {code}" if (code or 0) < 0 else f"exit code {code}: {log_tail(self._log, self._logged)}"

    async def wait(self) -> int:
        """Wait until it has ended, or its host is lost; returns its exit code."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """Ask it to leave."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once; a host that does not report its end in time counts as lost."""
        self._signal(signal.SIGKILL)
        asyncio.get_running_loop().call_later(_KILL_S, self._end, LOST, f"no answer within {_KILL_S:g} s")

    def _signal(self, number: int) -> None:
        if self.returncode is None:
            self.asked = True
            self.seat.send("signal", int(number))

    async def _follow(self) -> None:
        try:
            while True:
                news: News = await self.seat.call("news")
                for name, content in news.output.items():
                    with contextlib.suppress(OSError):  # the disk is full: the process is well
                        append_private(self._log.with_name(name), content)
                if news.code is not None:
                    self._end(news.code)
                    return
        except HostLost as error:
            self._end(LOST, str(error))

    def _end(self, code: int, lost: str = "") -> None:
        if not self._ended.done():
            self.lost = lost
            self._ended.set_result(int(code))
            self._over(self)


class RayPlacement:
    """See `Placement`: processes of the roles in `placement.roles` on hosts of a Ray cluster, all others here.

    The connection is made with the first process that Ray places; all bundles are given back when this process ends.
    """

    def __init__(self, config: Config, files: RunFiles) -> None:
        self._config = config
        self._files = files
        self._local = LocalProcesses(files.logs)
        self._cluster: RayCluster | None = None
        self._joining = asyncio.Lock()
        self._free: dict[str, Seat] = {}  # of processes that died and were not asked to: the next start takes it
        self._answered = 0.0  # when the head did last
        self._away = False
        self._tasks = BackgroundTasks()

    @property
    def away_s(self) -> float:
        """See `Placement.away_s`: of the head of the cluster."""
        return time.monotonic() - self._answered if self._away else 0.0

    async def _watch_head(self, cluster: RayCluster) -> None:
        while True:
            self._away = not await cluster.answers()
            if not self._away:
                self._answered = time.monotonic()
            await asyncio.sleep(_HEAD_S)  # no event announces that it is gone

    def here(self, job: Job) -> bool:
        """See `Placement`: where its host is not chosen by Ray."""
        return job.module != "actors.main" or not is_placed(self._config, job.name)

    def log(self, name: str) -> Path:
        """The file that holds what the processes of this name printed, wherever they ran."""
        return self._local.log(name)

    async def start(self, job: Job) -> Placed:
        """Start a process in the bundle that its actor has, or in a new one.

        Raises:
            NoRoom: no node has room for its bundle now.
            HostFailed: its host could not do it.
            NoCluster: there is no Ray cluster.
        """
        if self.here(job):
            return await self._local.start(job)
        async with self._joining:
            if self._cluster is None:
                self._cluster = await asyncio.to_thread(RayCluster, self._config.placement.address)
                self._answered = time.monotonic()
                self._tasks.start(self._watch_head(self._cluster))
                for number in (signal.SIGTERM, signal.SIGINT):  # Ray has replaced them with its own handlers
                    signal.signal(number, signal.getsignal(number))
        if kept := self._free.pop(job.name, None):
            with contextlib.suppress(HostLost):  # it was lost between the two
                return await self._start_or_release(kept, job)
        try:
            return await self._start_or_release(await self._reserved(self._cluster, job.name), job)
        except HostLost as error:
            raise NoRoom(f"it waits for a host, since one was lost as it started: {error}") from error

    async def _start_or_release(self, seat: Seat, job: Job) -> RayProcess:
        try:
            return await self._start_in(seat, job)
        except BaseException:
            self._release(seat)
            raise

    async def _reserved(self, cluster: RayCluster, actor_id: str) -> Seat:
        bundle, settings = bundle_of(self._config, actor_id), self._config.placement
        run = run_key(self._config.run, self._files)
        if self._away:
            await asyncio.sleep(_HEAD_S)  # a call of Ray would wait until Ray ends this process
            raise NoRoom(f"it waits for the head of the Ray cluster at {cluster.head}, which does not answer")
        seat = await cluster.reserve(settings.folder, run, actor_id, bundle, _ROOM_S)
        if seat is None:
            raise NoRoom(f"it waits for a node of the Ray cluster with room for its bundle {bundle_text(bundle)}")
        return seat

    async def _start_in(self, seat: Seat, job: Job) -> RayProcess:
        assert job.credentials is not None and self._cluster is not None

        async def call(method: str, *arguments: Any) -> Any:
            try:
                async with asyncio.timeout(_START_S):
                    return await seat.call(method, *arguments)
            except TimeoutError:
                raise HostLost(f"it did not answer `{method}` within {_START_S:g} s") from None

        home, address, found = await call("prepare")
        if found != installed():
            raise HostFailed(f"{address} has {found}, this machine {installed()}; install the same there")
        role, here = role_of(job.name), self._cluster.here
        parcel = Parcel(self._config, self._files, Path(home), here if address != here else "")
        for name, content in parcel.files(role, job.credentials).items():
            await call("keep", name, content)
        words = [*job.words, "--host", address, "--credentials", f"{home}/{parcel.login_name(job.credentials)}"]
        if not self._config.placement.shared:
            words += ["--home", home]
            if role in USES_MODEL:
                await send_model(call, self._files.model_path(self._config.model), whole=role == "engine")
        pid = await call("start", job.module, words, dict(job.environment))
        return RayProcess(seat, pid, self.log(job.name), lambda process: self._over(job.name, process))

    def _over(self, name: str, process: RayProcess) -> None:
        if process.lost or process.asked:
            self._release(process.seat)
        else:
            self._free[name] = process.seat
            kept_s = self._config.supervision.restart_pause_s + _KEPT_S
            asyncio.get_running_loop().call_later(kept_s, self._give_back, name, process.seat)

    def _give_back(self, name: str, seat: Seat) -> None:
        """Release the bundle of a process that was not started again: its actor is not wanted any more."""
        if self._free.get(name) is seat:
            self._release(self._free.pop(name))

    def _release(self, seat: Seat) -> None:
        self._tasks.start(asyncio.to_thread(seat.release))
