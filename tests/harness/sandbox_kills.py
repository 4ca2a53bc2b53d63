"""Kills of all that a trajectory in a sandbox needs: its worker, its sandbox, the server of sandboxes, and NATS."""

import asyncio
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from asyncrl.ports import free_port
from asyncrl.process import python, with_parent
from asyncrl.run.fault_injection import NATS, Rests, parts
from harness.runs import Run
from harness.stage import until

POOL, SANDBOX, WORKER = "pool", "sandbox", "rollout"
KINDS = (WORKER, SANDBOX, POOL, NATS)
LEFT_S = 5.0  # after which nothing is left of a killed process


class Pool:
    """`asyncrl sandboxes` in a process that is started again after each kill, as a service manager does."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def _keep(self) -> None:
        (self._folder / "pool.toml").write_text('[sandbox]\nkind = "bubblewrap"\n')
        words = ("sandboxes", "pool.toml", "--port", self.url.rpartition(":")[2])
        while True:
            self._process = await asyncio.create_subprocess_exec(
                *python("-m", "asyncrl.cli.main", *words),
                cwd=self._folder,
                stdout=asyncio.subprocess.DEVNULL,
                preexec_fn=with_parent(),
            )
            await self._process.wait()

    async def start(self) -> None:
        self._keeping = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End it, and all its sandboxes."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def server(self) -> psutil.Process | None:
        """Return the process of the server."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid) if self._process is not None else None
        return None

    def sandboxes(self) -> list[psutil.Process]:
        """Return the first processes of all sandboxes."""
        with suppress(psutil.NoSuchProcess):
            children = self.server().children() if self.server() is not None else []
            return [child for child in children if "--die-with-parent" in _words(child)]
        return []

    async def is_empty(self) -> None:
        """Wait until no sandbox is left; fail with what is left after `LEFT_S`."""
        left: list[str] = []
        until_s = time.monotonic() + LEFT_S
        while time.monotonic() < until_s:
            left = [_line(process) for process in self.sandboxes()]
            if not left:
                return
            await asyncio.sleep(0.05)
        pytest.fail(f"after {LEFT_S:g} s there are {left}")


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):  # it has just ended
        return process.cmdline()
    return []


def _line(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess), process.oneshot():
        below = [f"{one.pid} {one.status()}" for one in process.children(recursive=True)]
        waits = Path(f"/proc/{process.pid}/wchan").read_text()
        age_s = time.time() - process.create_time()
        return f"{process.cmdline()[:4]} {process.status()} in {waits} for {age_s:.1f} s, above {below}"
    return ""


@asynccontextmanager
async def pool_in(folder: Path) -> AsyncIterator[Pool]:
    """A server of sandboxes for the length of the block."""
    pool = Pool(folder)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


async def kill_often(
    run: Run, pool: Pool, *, kills: int, every_s: float, kinds: Sequence[str] = KINDS, seed: int = 1
) -> Counter[str]:
    """Kill one after the other, of each kind as often, until that many are dead or the run ends; returns the kinds.

    After each kill of a server, all processes of its sandboxes are gone within `LEFT_S`.
    """
    dice, rests, done = random.Random(seed), Rests(run.root), Counter[str]()
    for kind in itertools.cycle(kinds):
        if done.total() >= kills or run.ended_by_itself:
            return done
        killed = [] if rests.has(kind) else _chosen(kind, run, pool, dice)
        below = [child for one in killed for child in _children(one)] if kind in (POOL, SANDBOX) else []
        for process in killed:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
                done[kind] += 1
                rests.note(kind if kind in (WORKER, NATS) else f"{kind}{done[kind]}")
        began = time.monotonic()
        await until(lambda below=below: not any(map(_lives, below)), f"all below the {kind} end", LEFT_S)
        await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began)))
    raise AssertionError


def _chosen(kind: str, run: Run, pool: Pool, dice: random.Random) -> list[psutil.Process]:
    if kind == POOL:
        found = [pool.server()] if pool.sandboxes() else []
    elif kind == SANDBOX:
        found = pool.sandboxes()
    else:
        found = [part.process for part in parts(run.root) if part.role == kind]
    return [dice.choice(found)] if found else []


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
