"""Sinks of a recorder that is killed, or whose sink fails: each step is in each sink once, and the run continues."""

import json
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
from harness.sinks import READERS, Found, installed_kinds, need, same
from harness.stage import Stage, until
from topics.actors import VITALS_TAKEN, RunOpened, Vitals
from topics.batches import BATCH_TRAINED, BatchPacked, BatchTrained, Objective
from topics.evals import EvalScored

BY_KEEPER = {"writer": "test"}
LIVES, STEPS = 6, 20  # steps of each life


async def steps(bus: Bus, first: int, last: int) -> None:
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


async def test_every_sink_has_each_step_once_after_a_recorder_was_killed_many_times(
    bus: Bus, stage: Callable[..., Stage]
):
    kinds = installed_kinds()
    made = stage(metrics=[{"kind": kind} for kind in kinds], recorder={"plot": False})
    root = made.files.root
    (root / "base").write_text(str(root))
    await publish(bus, RunOpened(LIVES * STEPS, 0, {}))
    for life in range(LIVES):
        process = await made.start("recorder")
        await steps(bus, life * STEPS + 1, life * STEPS + STEPS)
        # Each life ends somewhere in the middle of its rows, in one sink after the other.
        wanted, name = 2 * life * STEPS + 3 * life + 1, kinds[life % len(kinds)]
        await until(lambda wanted=wanted, name=name: rows_of(root, name) >= wanted, f"{name} has {wanted} rows")
        process.kill()
        await process.wait()

    await finish(made, bus)

    expected = await trained(bus)
    assert len(expected) == LIVES * STEPS
    for kind in kinds:
        same(READERS[kind](root), expected)
        assert rows_of(root, kind) == 2 * LIVES * STEPS


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
    await steps(bus, 1, 6)
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
    await steps(bus, 1, 6)
    await finish(made, bus)

    for _ in range(2):
        words = ["export", str(root), "--to", kind]
        assert command([*words, "--option", "directory=metrics"] if kind == "file" else words) == 0

    same(READERS[kind](root), await trained(bus))
