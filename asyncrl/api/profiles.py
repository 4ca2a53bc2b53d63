"""Profiles and stacks of the actors of a live run whose directory is on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Literal

import psutil

from asyncrl.api.requests import watched
from asyncrl.bus.connection import Bus
from asyncrl.bus.merged_reader import newest_message
from asyncrl.bus.publish import publish
from asyncrl.config.engine_settings import Capability
from asyncrl.engine.control import read_key
from asyncrl.errors import AsyncRLError
from asyncrl.process import STACK_SIGNAL
from asyncrl.run.connect import FoundRun
from asyncrl.state.run_state import RunState
from topics.engines import ENGINE_READY
from topics.profiles import ProfileRequested, ProfileStored

_LIMIT_S = 30.0  # for py-spy to start and write
_STACK_S = 5.0


async def profile_steps(found: FoundRun, actor_id: str, steps: int, wait_s: float) -> list[Path]:
    """Have the learner record its next steps; returns the trace of each, which Perfetto opens.

    Raises:
        AsyncRLError: they were not made within `wait_s`.
    """
    async with watched(found, "profile") as (bus, state, until):
        before = [*state.profiles]
        await publish(bus, ProfileRequested(steps))

        def new() -> list[ProfileStored]:
            return [one for one in state.profiles if one not in before and one.kind == "steps"]

        if not await until(lambda: len(new()) >= steps, wait_s):
            raise AsyncRLError(
                f"after {wait_s:.0f} s {len(new())} of {steps} steps of {actor_id} are recorded; the request stays. "
                f"`asyncrl doctor {found.run}` names what keeps the learner"
            )
        return [found.files.root / one.path for one in new()]


async def profile_cpu(found: FoundRun, actor_id: str, seconds: float) -> Path:
    """Sample the Python stacks of an actor with py-spy; returns the file, which speedscope.app opens.

    Raises:
        AsyncRLError: py-spy is missing or not permitted, or the actor is not on this machine.
    """
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        raise AsyncRLError("py-spy is not installed: pip install 'asyncrl[profile]'")
    async with watched(found, "profile") as (bus, state, _until):
        pid = _pid_of(state, actor_id)
        path = _new_path(found, f"{actor_id}-cpu", "speedscope.json")
        words = ("record", "--pid", str(pid), "--duration", f"{max(1, round(seconds))}")
        process = await asyncio.create_subprocess_exec(
            *(program, *words, "--format", "speedscope", "--output", str(path)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), seconds + _LIMIT_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode or not path.exists():
            why = output.decode(errors="replace").strip().splitlines()[-1:] or [f"it ended with {process.returncode}"]
            raise AsyncRLError(
                f"py-spy recorded nothing of {actor_id} (process {pid}): {why[0]}; it needs root, or "
                "kernel.yama.ptrace_scope = 0. `asyncrl stack` needs neither"
            )
        return await _stored(bus, found, actor_id, "cpu", path)


async def profile_engine(found: FoundRun, engine_id: str, seconds: float) -> Path:
    """Have an inference server record itself; returns the folder that it writes to.

    Raises:
        AsyncRLError: servers of its kind cannot, or the server refused.
    """
    config = found.files.read_config()
    group = config.engine.group_of(engine_id)
    if not group.can(Capability.PROFILES):
        raise AsyncRLError(
            f"{engine_id} is a server of kind {group.kind}, which records no profile; `asyncrl stack {engine_id}` "
            "shows its actor"
        )
    async with watched(found, "profile") as (bus, _state, _until):
        ready = await newest_message(bus, ENGINE_READY, engine_id)
        if ready is None:
            raise AsyncRLError(f"{engine_id} was never ready; `asyncrl status {found.run}` lists engines")
        key = read_key(found.files.engine_key_file(config.engine, engine_id))
        folder = _new_path(found, f"{engine_id}-engine", "trace")
        await resolve_name(group.of_kind.profiler)(ready[0].address, key, folder, seconds)
        return await _stored(bus, found, engine_id, "engine", folder)


async def read_stack(found: FoundRun, actor_id: str) -> tuple[str, Path]:
    """Have an actor write the stacks of its threads; returns them, and the file that keeps them.

    Raises:
        AsyncRLError: the actor is not on this machine, or wrote nothing.
    """
    async with watched(found, "stack") as (bus, state, _until):
        pid = _pid_of(state, actor_id)
        if not _catches(pid):
            raise AsyncRLError(f"{actor_id} (process {pid}) does not write stacks yet; it may just have started")
        log = found.files.logs / f"{actor_id}.log"
        begin = log.stat().st_size if log.exists() else 0
        os.kill(pid, STACK_SIGNAL)
        text, size = "", -1
        async with asyncio.timeout(_STACK_S):
            while not text or len(text) != size:  # no event announces that a file grew
                size = len(text)
                await asyncio.sleep(0.1)
                text = _stack_in(log, begin)
        path = _new_path(found, f"{actor_id}-stack", "txt")
        path.write_text(text, encoding="utf-8")
        await _stored(bus, found, actor_id, "stack", path)
        return text, path


def _stack_in(log: Path, begin: int) -> str:
    """Return the lines of a log from a byte on that are no records of the log."""
    with log.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(line for line in lines if not line.startswith("{"))


def _catches(pid: int) -> bool:
    """Return whether a process has a handler for the signal, which would end it otherwise."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (STACK_SIGNAL - 1) & 1)


def _pid_of(state: RunState, actor_id: str) -> int:
    """Return the process of an actor.

    Raises:
        AsyncRLError: there is none on this machine.
    """
    actor = state.actors.get(actor_id)
    if actor is None or not actor.live:
        known = ", ".join(sorted(name for name, one in state.actors.items() if one.live)) or "none"
        raise AsyncRLError(f"run {state.run} has no live actor {actor_id}; there are: {known}")
    if actor.host != socket.gethostname():
        raise AsyncRLError(f"{actor_id} is on {actor.host}, and this is {socket.gethostname()}; run the command there")
    words = psutil.Process(actor.pid).cmdline() if psutil.pid_exists(actor.pid) else []
    if actor_id not in words:
        raise AsyncRLError(f"process {actor.pid} is not {actor_id} any more; try again once it has started")
    return actor.pid


def _new_path(found: FoundRun, name: str, ending: str) -> Path:
    folder = found.files.profiles
    folder.mkdir(exist_ok=True)
    number = sum(path.name.startswith(f"{name}-") for path in folder.iterdir()) + 1
    return folder / f"{name}-{number}.{ending}"


async def _stored(
    bus: Bus, found: FoundRun, actor_id: str, kind: Literal["cpu", "engine", "stack"], path: Path
) -> Path:
    await publish(bus, ProfileStored(actor_id, kind, str(path.relative_to(found.files.root))))
    return path
