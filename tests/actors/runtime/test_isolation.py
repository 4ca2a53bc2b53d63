"""Work that came back again and again is done alone: nothing waits for it, and what is healthy never becomes poison."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish, publish_if_latest, read
from asyncrl.bus.pull import Puller
from harness.results import dead_letters, generated, is_done
from harness.stage import LONGEST_S, Stage, provision_leased, until
from topics.engines import EngineReady
from topics.prompts import PromptIssued, PromptRow
from topics.prompts import Stage as TrainingStage
from topics.table import QUEUES
from topics.trajectories import (
    TRAJECTORY_FAILED,
    TRAJECTORY_GENERATED,
    TRAJECTORY_GRADED,
    TrajectoryFailed,
    TrajectoryProgressed,
)

LIMIT_S = 3 * LONGEST_S  # of a test that starts several processes, one after another
ROLLOUTS = """
import asyncio
import os
import signal
import time
from pathlib import Path

HERE = Path(__file__).parent

async def leave():
    raise SystemExit(0)

async def rollout(row, context):
    with (HERE / "calls").open("a") as calls:
        calls.write(f"{row.label} {os.getpid()}\\n")
    if row.label == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
    if row.label == "exits":
        await asyncio.gather(leave())
    if row.label == "blocks":
        time.sleep(3600)
    if row.label == "holds" and not (HERE / "go").exists():
        await asyncio.Event().wait()
    await context.generate([1, 2])
"""
KILLS_ITS_WORKER = """
import os
import signal
from pathlib import Path

def reward(completion):
    if completion != "ab":
        pid = os.getpid()
        while b"actors." not in (words := Path(f"/proc/{pid}/cmdline").read_bytes()):
            if not words:
                signal.pause()  # it is killed already: whoever is above it is not to be
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])  # its parent
        os.kill(pid, signal.SIGKILL)
        signal.pause()  # the next call would find another parent
    return 1.0
"""


class Scene:
    """A run with rollout workers that are started again when they die, as the supervisor does."""

    def __init__(self, stage: Stage, bus: Bus, folder: Path) -> None:
        self.stage, self.bus, self.folder = stage, bus, folder
        self.dead: list[int] = []  # processes of workers

    async def issue(self, name: str, label: str, stage: TrainingStage = "rl") -> None:
        prompt_id, member = name.split("-")
        rows = [PromptRow("^ab=", label)]
        message = PromptIssued(prompt_id=prompt_id, member=int(member), group_size=1, rows=rows, stage=stage)
        await publish(self.bus, message)

    async def engine(self) -> None:
        """An engine with version 0 takes requests."""
        await publish(self.bus, EngineReady("engine-1", "scripted:1", 0, 0, "made", 16))

    async def suspect(self, name: str, label: str, stage: TrainingStage = "rl") -> None:
        """A trajectory that was begun three times without coming further."""
        await self.issue(name, label, stage)
        message = TrajectoryProgressed(trajectory_id=name, delivery=3, log="rollout-9-dead", fruitless=3)
        await publish_if_latest(self.bus, message, expected=0)

    def calls(self, label: str) -> list[int]:
        """The processes in which the rollout function began with such a row."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [int(line.split()[1]) for line in lines if line.split()[0] == label]

    async def is_generated(self, name: str) -> bool:
        return await read_last(self.bus, TRAJECTORY_GENERATED, name) is not None

    async def failure(self, name: str) -> TrajectoryFailed | None:
        newest = await read_last(self.bus, TRAJECTORY_FAILED, name)
        return None if newest is None else await read(self.bus, TrajectoryFailed, newest)

    async def work_until(self, role: str, done: Callable[[], Awaitable[bool]]) -> None:
        """Keep a worker up until something holds."""
        async with asyncio.timeout(LIMIT_S):
            while not await done():
                process = await self.stage.start(role)
                while process.returncode is None and not await done():
                    await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=0.05)
                if process.returncode is not None:
                    self.dead.append(process.pid)


@pytest.fixture
def scene(bus: Bus, stage: Callable[..., Stage], tmp_path: Path) -> Callable[..., Scene]:
    """Makes a scene; arguments are tables of the settings."""

    def make(**tables: Any) -> Scene:
        (tmp_path / "rollouts.py").write_text(ROLLOUTS)
        task = {"rollout": f"{tmp_path / 'rollouts.py'}:rollout"}
        tables["workers"] = {"lease_s": 0.5} | tables.get("workers", {})
        made = stage(engine={"kind": "scripted"}, task=task, **tables)
        made.make_model()
        return Scene(made, bus, tmp_path)

    return make


async def give_back(bus: Bus, count: int) -> None:
    """Have so many messages of the queue delivered to somebody who gives them back."""
    queue, got = QUEUES["rollout"], list[Msg]()
    puller = Puller(bus, f"{queue.stream.full_name(bus.run)}.{queue.name}", got.append)
    await puller.start(count)
    await until(lambda: len(got) == count, "they are delivered")
    await puller.close()
    for message in got:
        await bus.send(message.reply, b"-NAK")


async def test_a_warm_up_trajectory_that_came_back_again_and_again_waits_for_no_engine(bus: Bus, scene: Any):
    """No engine can be there before the warm-up ends."""
    play = scene()
    await play.suspect("w000000-0", "ba", "warmup")
    await give_back(bus, 1)
    await play.issue("p000000-0", "ba")  # waits for an engine, in front of what follows
    await play.issue("w000001-0", "ba", "warmup")
    await play.stage.start("rollout")

    await until(lambda: play.is_generated("w000000-0"), "the one that came back is done")
    await until(lambda: play.is_generated("w000001-0"), "and so is the other")


async def test_one_that_waits_for_an_engine_keeps_no_other_from_being_done_alone(bus: Bus, scene: Any):
    play = scene()
    await play.suspect("p000000-0", "ba")
    await play.suspect("w000000-0", "ba", "warmup")
    await give_back(bus, 2)
    await play.stage.start("rollout")
    await until(lambda: play.is_generated("w000000-0"), "the other is done")
    assert not await play.is_generated("p000000-0")

    await play.engine()

    await until(lambda: play.is_generated("p000000-0"), "it is done once there is an engine")


@pytest.mark.parametrize("label", ["kills", "exits"])
async def test_what_ends_its_process_is_poison_and_its_neighbours_are_done(bus: Bus, scene: Any, label: str):
    play = scene()
    await play.engine()
    names = [f"p{number:06d}-0" for number in range(5)]
    for name in names:
        await play.issue(name, label if name == "p000003-0" else "ba")

    await play.work_until("rollout", lambda: is_done(bus, "rollout"))

    failed = await play.failure("p000003-0")
    assert failed is not None
    ended = "exit code -9" if label == "kills" else "exit code 1"
    assert failed.reason == "poison"
    assert failed.detail == f"3 runs without progress, then 2 alone that ended in {ended}"
    assert [letter.reason for letter in await dead_letters(bus)] == [f"poison: {failed.detail}"]
    calls = play.calls(label)
    assert len(calls) == 5
    assert len([process for process in calls if process in play.dead]) == 3  # the others were beside their worker
    for name in names:
        assert await play.is_generated(name) == (name != "p000003-0")


async def test_hundreds_of_suspects_are_done_by_few_processes_and_only_the_guilty_one_is_poison(bus: Bus, scene: Any):
    await provision_leased(bus, 10.0)
    play, count = scene(workers={"lease_s": 10.0}), 200
    await play.engine()
    names = [f"p{number:06d}-0" for number in range(count)]
    await asyncio.gather(*(play.suspect(name, "kills" if name == "p000100-0" else "ba") for name in names))
    await give_back(bus, count)

    worker = await play.stage.start("rollout")
    await until(lambda: is_done(bus, "rollout"), "all are over")

    failed = await play.failure("p000100-0")
    assert failed is not None
    assert failed.detail == "3 runs without progress, then 2 alone that ended in exit code -9"
    assert all([await play.is_generated(name) for name in names if name != "p000100-0"])
    guilty, harmless = play.calls("kills"), play.calls("ba")
    assert len(guilty) == 2
    assert len(harmless) == count - 1
    assert len({*guilty, *harmless}) <= 4 + 2  # four at once, and one in place of each that was killed
    assert guilty[1] not in harmless  # its last run was in a process that had done nothing else
    assert worker.pid not in {*guilty, *harmless}


async def test_a_healthy_trajectory_never_becomes_poison_however_often_its_workers_die(bus: Bus, scene: Any):
    play = scene()
    await play.engine()
    await play.issue("p000000-0", "holds")

    for death in range(1, 7):
        process = await play.stage.start("rollout")
        await until(lambda at=death: len(play.calls("holds")) >= at, f"it begins once more, after {death - 1} deaths")
        process.kill()
        await process.wait()
        assert await play.failure("p000000-0") is None
    (play.folder / "go").touch()
    await play.stage.start("rollout")
    await until(lambda: play.is_generated("p000000-0"), "it is done")

    assert await play.failure("p000000-0") is None
    assert await dead_letters(bus) == []


async def test_a_worker_that_is_asked_to_leave_gives_back_what_is_done_alone(bus: Bus, scene: Any):
    await provision_leased(bus, 600.0)
    play = scene(workers={"lease_s": 600.0})
    await play.engine()
    await play.suspect("p000000-0", "holds")
    await give_back(bus, 1)
    process = await play.stage.start("rollout")
    await until(lambda: len(play.calls("holds")) == 1, "it begins")
    assert play.calls("holds") != [process.pid]

    process.terminate()
    assert await asyncio.wait_for(process.wait(), 120) == 0
    (play.folder / "go").touch()
    await play.stage.start("rollout")

    await until(lambda: play.is_generated("p000000-0"), "another worker does it, though the lease is long")


async def test_what_stands_still_in_a_process_of_its_own_is_killed_and_poison(bus: Bus, scene: Any):
    play = scene(supervision={"silence_s": 2.0})
    await play.engine()
    await play.suspect("p000000-0", "blocks")
    await give_back(bus, 1)
    await play.issue("p000001-0", "ba")
    await play.stage.start("rollout")
    await until(lambda: is_done(bus, "rollout"), "both are over")

    failed = await play.failure("p000000-0")
    assert failed is not None
    assert failed.detail == "3 runs without progress, then 2 alone that ended in no heartbeat"
    assert await play.is_generated("p000001-0")


@pytest.mark.real_start
async def test_a_reward_that_ends_its_worker_is_poison(bus: Bus, scene: Any, tmp_path: Path):
    (tmp_path / "reward.py").write_text(KILLS_ITS_WORKER)
    play = scene(reward={"function": f"{tmp_path / 'reward.py'}:reward"})
    for number in range(2):
        await publish(bus, generated(number))

    await play.work_until("reward", lambda: is_done(bus, "reward"))

    failed = await play.failure("p000001-0")
    assert failed is not None
    assert failed.reason == "poison"
    assert await play.failure("p000000-0") is None
    assert await read_last(bus, TRAJECTORY_GRADED, "p000000-0") is not None
    assert await read_last(bus, TRAJECTORY_GRADED, "p000001-0") is None
    assert len(play.dead) == 3
