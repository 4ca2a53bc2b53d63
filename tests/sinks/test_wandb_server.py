"""What the package `wandb` uploads of a run: the offline file by `wandb sync`, and rows that are sent at once."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.process import with_parent
from harness.sinks import eval_row, metrics_row, need
from harness.stage import until
from harness.wandb_server import WandbServer, wandb_server

FEED = """
import sys
from pathlib import Path
from asyncrl.sinks.feed import SinkFeed
from asyncrl.sinks.kinds import KINDS
from asyncrl.sinks.sink import SinkRun

root, mode = Path(sys.argv[1]), sys.argv[2]
sink = KINDS["wandb"](mode=mode).sink(SinkRun("demo", root, root, 1_795_000_000.0, {"seed": 1}))
feed = SinkFeed("wandb", sink, root / "metrics.jsonl")
feed.open()
while feed.advance((root / "metrics.jsonl").stat().st_size):
    pass
print("given", flush=True)
if sys.stdin.readline():
    feed.close()
"""
pytestmark = pytest.mark.slow
RUN_ID = "demo-1795000000"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    need("wandb")
    return tmp_path


def write(root: Path, first: int, last: int) -> None:
    rows = [row for step in range(first, last + 1) for row in (metrics_row(step), eval_row(step))]
    with (root / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


async def feed(root: Path, server: WandbServer, mode: str, *, kill: bool = False, has: int = 0) -> None:
    """A process that gives all rows to a sink, and is killed before it closes the sink: once the server has some."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", FEED, str(root), mode),
        env=os.environ | server.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=with_parent(),
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(200):
            while b"given" not in (line := await process.stdout.readline()):
                assert line, "the process ended"
            if kill:
                await until(lambda: len(server.history.get(RUN_ID, [])) >= has, f"the server has {has} rows")
                process.kill()
            else:
                process.stdin.write(b"close\n")
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def steps(server: WandbServer) -> list[int]:
    return [int(row["step"]) for row in server.history[RUN_ID] if "train/loss" in row]


async def test_wandb_sync_uploads_each_step_of_the_offline_file_once(root: Path):
    async with wandb_server() as server:
        write(root, 1, 40)
        await feed(root, server, "offline", kill=True)
        write(root, 41, 200)
        await feed(root, server, "offline")
        [folder] = root.glob("wandb/offline-run-*")
        words = [str(Path(sys.executable).parent / "wandb"), "sync", str(folder)]
        process = await asyncio.create_subprocess_exec(
            *words, env=os.environ | server.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), 200)

        assert process.returncode == 0, output.decode()
        assert steps(server) == [*range(1, 201)]
        assert server.history[RUN_ID][0]["train/loss"] == pytest.approx(0.25)


async def test_rows_that_are_sent_at_once_are_on_the_server_once_after_kills(root: Path):
    had: list[int] = []
    async with wandb_server() as server:
        for life in range(3):
            write(root, 20 * life + 1, 20 * life + 20)
            await feed(root, server, "online", kill=life < 2, has=80 * life)
            had = [*had, len(server.history[RUN_ID])]

        assert had[1:] == [80, 120]

        assert steps(server) == [*range(1, 61)]
