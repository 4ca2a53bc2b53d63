"""An actor started by hand, with its login alone: the settings come over the bus."""

import asyncio
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.main import parse
from actors.runtime.actor import ActorFault, open_context
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish, read
from asyncrl.telemetry.logs import open_log
from harness.stage import Stage, until
from topics.engines import EngineReady
from topics.prompts import PromptIssued, PromptRow
from topics.trajectories import TRAJECTORY_GRADED, TrajectoryGraded


async def test_workers_started_by_hand_in_an_empty_folder_join_the_run_and_work(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    play = stage(engine={"kind": "scripted"}, reward={"function": "exact"})
    play.make_model()
    await play.open()
    (empty := tmp_path / "elsewhere").mkdir()
    processes = []
    for role in ("rollout", "reward"):
        shutil.copy(play.files.credentials / f"{role}.json", empty)
        words = [role, f"{role}-77", "--run", bus.run, "--credentials", f"{role}.json"]
        processes.append(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "actors.main", *words, "--address", bus.address.url, cwd=empty
            )
        )
    try:
        await publish(bus, EngineReady("engine-1", "scripted:1", 0, 0, "made", 16))
        await publish(bus, PromptIssued(prompt_id="p000001", member=0, group_size=1, rows=[PromptRow("^ab=", "ba")]))

        async def graded() -> bool:
            return await read_last(bus, TRAJECTORY_GRADED, "p000001-0") is not None

        await until(graded, "the trajectory is sampled and graded")
        record = await read_last(bus, TRAJECTORY_GRADED, "p000001-0")
        assert record is not None
        assert record.headers["by"] == "reward-77"
        assert (await read(bus, TrajectoryGraded, record)).prompt_id == "p000001"
        assert {file.name for file in empty.iterdir()} == {"rollout.json", "reward.json"}
    finally:
        for process in processes:
            process.terminate()
        codes = [await asyncio.wait_for(process.wait(), 120) for process in processes]
    assert codes == [0, 0]


async def test_a_run_that_was_never_opened_is_named_with_its_server(bus: Bus, stage: Callable[..., Stage]):
    play = stage()
    login = parse(
        ["reward", "reward-1", "--run", bus.run, "--credentials", str(play.files.credentials / "reward.json")]
    )

    with pytest.raises(ActorFault, match=f"no run called {bus.run} was opened on the server at"):
        await open_context(login, open_log(actor="reward-1"))
