"""A second terminal beside a run."""

import asyncio
import fcntl
from pathlib import Path

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.process import python
from asyncrl.run.connect import SUPERVISOR
from harness.published_messages import publish_started


class Terminal:
    """A folder with the directory of a live run, where commands are typed."""

    def __init__(self, folder: Path, bus: Bus, server) -> None:
        self.folder = folder
        root = folder / "runs" / bus.run
        (root / "logs").mkdir(parents=True)
        (root / "config.json").write_text("{}")
        server.address.save(root / "nats.json")
        self.logs = root / "logs"
        self.lock = (root / "lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    async def type(self, *words: str) -> tuple[int | None, str, str]:
        """Run a command to its end; returns its exit code, output and messages."""
        process = await self.start(*words)
        async with asyncio.timeout(120):
            out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()

    async def start(self, *words: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *python("-m", "asyncrl.cli.main", *words), cwd=self.folder, stdout=pipe, stderr=pipe
        )


@pytest.fixture
async def terminal(tmp_path, bus, server):
    await publish_started(bus, SUPERVISOR)
    terminal = Terminal(tmp_path, bus, server)
    yield terminal
    terminal.lock.close()
