"""Sinks of a recorder that is killed, or whose sink fails: each step is in each sink once, and the run continues."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from actors.recorder.actor import main
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.merged_reader import read_each
from asyncrl.bus.publish import publish
from asyncrl.cli.main import run as command
from asyncrl.ports import free_port
from harness.sinks import READERS, Found, installed_kinds, need, same
from harness.stage import Stage, until
from harness.wandb_server import LOGIN, wandb_server
from topics.actors import VITALS_TAKEN, RunOpened, Vitals
from topics.batches import BATCH_TRAINED, BatchPacked, BatchTrained, Objective
from topics.evals import EvalScored

BY_KEEPER = {"writer": "test"}


async def publish_steps(bus: Bus, first: int, last: int) -> None:
    """Steps as buffer and learner publish them."""
    for step in range(first, last + 1):
        await publish(bus, BatchPacked(step, "rl", [], 0, Objective(), {}), headers=BY_KEEPER)
        loss = {"loss": 1 / (step + 3)}
        await publish(bus, BatchTrained(step, 0, "rl", loss, {0: 10}, 0, [0.1, 0.1], 8, step), headers=BY_KEEPER)
        await publish(bus, EvalScored(f"e{step:06d}", step, {step: 3}, 0.5, 3, 0, 1.0), headers=BY_KEEPER)


async def trained(bus: Bus) -> Found:
    """Steps and losses of the log."""
    found: Found = []
    await read_each(bus, BATCH_TRAINED, lambda batch, _: found.append((batch.step, batch.metrics["loss"])))
    return found


async def finish(stage: Stage, bus: Bus) -> None:
    """Run a recorder in this process until it has written everything."""
    context = stage.context("recorder", bus)
    context.stop.set()
    await main(context)


def rows_of(root: Path, name: str) -> int:
    """Rows that a sink has by its stored position."""
    path = root / "sinks" / f"{name}.json"
    return sum(json.loads(path.read_text())["rows"].values()) if path.exists() else 0


@pytest.mark.parametrize(("lives", "steps"), [(6, 20), pytest.param(51, 4, marks=pytest.mark.nightly)])
async def test_every_sink_has_each_step_once_after_a_recorder_was_killed_many_times(
    bus: Bus, stage: Callable[..., Stage], lives: int, steps: int
):
    kinds, moment = installed_kinds(), random.Random(7)
    made = stage(metrics=[{"kind": kind} for kind in kinds], recorder={"plot": False})
    root = made.files.root
    (root / "base").write_text(str(root))
    await publish(bus, RunOpened(lives * steps, 0, {}))
    for life in range(lives):
        process = await made.start("recorder")
        await publish_steps(bus, life * steps + 1, life * steps + steps)
        # Each life ends somewhere in the middle of its rows, in one sink after the other.
        wanted, name = 2 * life * steps + 1, kinds[life % len(kinds)]
        await until(lambda wanted=wanted, name=name: rows_of(root, name) >= wanted, f"{name} has {wanted} rows")
        await asyncio.sleep(moment.uniform(0.0, 0.2))
        process.kill()
        await process.wait()

    await finish(made, bus)

    expected = await trained(bus)
    assert len(expected) == lives * steps
    for kind in kinds:
        same(READERS[kind](root), expected)
        assert rows_of(root, kind) == 2 * lives * steps


async def test_a_sink_that_fails_is_counted_and_continues_while_the_others_take_all_rows(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder of the sink should be")
    sinks = [{"kind": "file", "directory": str(blocked)}, {"kind": "file", "directory": str(tmp_path / "free")}]
    made = stage(metrics=sinks, recorder={"plot": False})
    await publish(bus, RunOpened(12, 0, {}))

    async def failures() -> float:
        record = await read_last(bus, VITALS_TAKEN, "recorder-1")
        values = msgspec.json.decode(record.data, type=Vitals).values if record is not None else {}
        return values.get("failing_sink_file", 0)

    process = await made.start("recorder")
    await publish_steps(bus, 1, 6)
    await until(lambda: rows_of(made.files.root, "file-2") == 12, "the other sink has all rows")

    async def failed_twice() -> bool:
        return await failures() >= 2

    await until(failed_twice, "its failures are counted")
    assert process.returncode is None
    blocked.unlink()
    await until(lambda: rows_of(made.files.root, "file") == 12, "the sink has what it lacked")

    async def recovered() -> bool:
        return not await failures()

    await until(recovered, "it is no longer reported")


@pytest.mark.parametrize("kind", READERS)
async def test_a_finished_run_is_exported_once(bus: Bus, stage: Callable[..., Stage], kind: str):
    need(kind)
    made = stage(recorder={"plot": False})
    root = made.files.root
    await publish(bus, RunOpened(6, 0, {}))
    await publish_steps(bus, 1, 6)
    await finish(made, bus)

    for _ in range(2):
        words = ["export", str(root), "--to", kind]
        assert command([*words, "--option", "directory=metrics"] if kind == "file" else words) == 0

    same(READERS[kind](root), await trained(bus))


@pytest.mark.slow
async def test_a_sink_of_a_server_that_is_away_is_counted_and_has_all_rows_once_it_is_back(
    bus: Bus, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    need("wandb")
    port = free_port()
    for name, value in (LOGIN | {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_INIT_TIMEOUT": "5"}).items():
        monkeypatch.setenv(name, value)
    made = stage(metrics=[{"kind": "wandb", "mode": "online"}, {"kind": "file"}], recorder={"plot": False})
    await publish(bus, RunOpened(12, 0, {}))
    process = await made.start("recorder")
    await publish_steps(bus, 1, 6)
    await until(lambda: rows_of(made.files.root, "file") == 12, "the other sink has all rows")

    async def failed() -> bool:
        record = await read_last(bus, VITALS_TAKEN, "recorder-1")
        values = msgspec.json.decode(record.data, type=Vitals).values if record is not None else {}
        return values.get("failing_sink_wandb", 0) >= 1

    await until(failed, "the failure is counted")
    async with wandb_server(port) as server:
        await publish_steps(bus, 7, 9)

        def stored() -> list[int]:
            rows = [row for history in server.history.values() for row in history]
            return [int(row["step"]) for row in rows if "train/loss" in row]

        await until(lambda: stored() == [*range(1, 10)], "the server has each step once")
        assert process.returncode is None
        process.terminate()
        await process.wait()
