"""Bringing a run up on this machine: its directory, its model, its NATS server, its warden."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from pathlib import Path

import msgspec

from actors.actor import RunFiles
from asyncrl.bus.connection import Bus
from asyncrl.bus.provision import is_provisioned, provision
from asyncrl.bus.server import BusAddress, EmbeddedServer, die_with_parent
from asyncrl.bus.talk import say
from asyncrl.cast import LoadedCast
from asyncrl.cli.find import WARDEN, is_locked
from topics.actors import RUN_OPENED, RunOpened

_STOP_S = 60.0  # for a warden to bring everybody home


class LaunchError(Exception):
    """The run cannot start; the message says why and what to do."""


class Launch:
    """A run on this machine, from its preparation to its end."""

    def __init__(self, loaded: LoadedCast) -> None:
        self.cast = loaded.cast
        self.base = loaded.base
        self.files = RunFiles(Path())
        self.address = BusAddress("")
        self._server: EmbeddedServer | None = None
        self._warden: asyncio.subprocess.Process | None = None
        self._lock = -1
        self.killed = False

    def prepare(self) -> None:
        """Take a run directory that nobody used before and write the settings down.

        A run that has ended keeps its directory; the next of that name is called `demo-2`, and so on.

        Raises:
            LaunchError: a run of this name is running.
        """
        root = Path(self.cast.directory).absolute()
        root.mkdir(parents=True, exist_ok=True)
        turn = os.open(root, os.O_RDONLY)
        fcntl.flock(turn, fcntl.LOCK_EX)  # two at once look one after the other
        try:
            self._take_directory(root)
        finally:
            os.close(turn)
        self.files.cast.write_bytes(msgspec.json.format(msgspec.json.encode(self.cast)) + b"\n")
        (self.files.root / "base").write_text(str(self.base.absolute()))

    def _take_directory(self, root: Path) -> None:
        name, number = self.cast.run, 1
        while (root / name).exists():
            if is_locked(root / name):
                raise LaunchError(
                    f"run {name} is already running in {root / name}; watch it with `asyncrl status {name}`, end it "
                    f"with `asyncrl down {name}`, or give this one another id: --set run=NAME"
                )
            number += 1
            name = f"{self.cast.run}-{number}"
        self.cast = msgspec.structs.replace(self.cast, run=name)
        self.files = RunFiles(root / name)
        self.files.logs.mkdir(parents=True)
        self._lock = os.open(self.files.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    async def start(self) -> Bus:
        """Start the server if none is given, provision the topics, make the model, start the warden.

        Raises:
            BusError: no server, or not one that can hold the run.
            LaunchError: the run id is taken on that server, or the model could not be made.
        """
        nats = self.cast.nats
        making = asyncio.create_task(self._make_model())
        try:
            if nats.url:
                password = (self.base / nats.password_file).read_text().strip() if nats.password_file else ""
                self.address = BusAddress(nats.url, nats.user, password)
                self.address.save(self.files.address)
            else:
                self._server = EmbeddedServer(self.files.root)
                self.address = await self._server.start()
            bus = await Bus.connect(self.address, self.cast.run, name="up")
            if nats.url and await is_provisioned(bus):
                await bus.close()
                raise LaunchError(
                    f"the server at {nats.url} already holds a run called {self.cast.run}; give this one another id: "
                    "--set run=NAME"
                )
            await provision(
                bus,
                payload_mb=nats.stream_max_mb,
                ledger_mb=nats.ledger_max_mb,
                lease_s=self.cast.rollout.lease_s,
            )
            await making
            opened = RunOpened(self.cast.learner.steps, self.cast.warmup.steps, msgspec.to_builtins(self.cast))
            await say(bus, RUN_OPENED, opened)
        finally:
            making.cancel()
        await self._start_warden()
        return bus

    async def ended(self) -> int:
        """Wait for the warden to end; returns its exit code."""
        assert self._warden is not None
        return await self._warden.wait()

    async def dismiss(self) -> int:
        """Bring everybody home; returns the warden's exit code."""
        assert self._warden is not None
        if self._warden.returncode is None:
            self._warden.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                return await self._warden.wait()
        except TimeoutError:
            self.kill()
            return await self._warden.wait()

    def kill(self) -> None:
        """End everybody at once: the kernel takes the actors with their warden."""
        self.killed = True
        if self._warden is not None and self._warden.returncode is None:
            self._warden.kill()

    async def stop(self) -> None:
        """Bring everybody home who is still there, then stop the server."""
        if self._warden is not None:
            await self.dismiss()
        if self._server is not None:
            await self._server.stop()
        if self._lock >= 0:
            os.close(self._lock)

    async def _make_model(self) -> None:
        """Make the untrained model where the cast names none, in a process of its own: this one stays small."""
        if self.cast.model.path:
            return
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "asyncrl.training.create",
            str(self.files.cast),
            str(self.files.model),
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        _, said = await process.communicate()
        if process.returncode:
            raise LaunchError(f"the model could not be made: {said.decode(errors='replace').strip()[-500:]}")

    async def _start_warden(self) -> None:
        with (self.files.logs / f"{WARDEN}.log").open("ab") as log:
            self._warden = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "actors.main",
                "warden",
                WARDEN,
                str(self.files.root),
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
                start_new_session=True,
            )
