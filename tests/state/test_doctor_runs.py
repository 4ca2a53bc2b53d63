"""The doctor in real runs: each cause is brought about, and named."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest

from asyncrl.bus.acks import MESSAGE_ID
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.provision import equal_sizes, provision
from asyncrl.bus.publish import publish, read
from asyncrl.bus.server import EmbeddedServer
from asyncrl.config.settings import Config
from asyncrl.state.diagnose import diagnose
from asyncrl.state.watch import collect_state
from harness.audited import audited_clean
from harness.disks import small_disk
from harness.runs import Run, address_of, command, resume, up
from harness.scripted import FLAT, SCRIPTED
from harness.stage import Connect, Stage, until
from topics.actors import (
    VITALS_TAKEN,
    ActorStarted,
    DeadLetter,
    FleetScaled,
    RunOpened,
    Vitals,
)
from topics.prompts import PromptIssued, PromptRow
from topics.trajectories import TRAJECTORY_GENERATED
from topics.weights import WEIGHTS_REFUSED, WeightsPublished, WeightsRefused

SLOW = pytest.mark.slow
MINUTE_NS = 60 * 10**9
ROOT = Path(__file__).parents[2]

SWITCHES = """
import asyncio
import time
from pathlib import Path

from asyncrl.rollout.context import single_turn

HERE = Path(__file__).parent

def reward(completion):
    while (HERE / "reward").exists():
        time.sleep(0.05)
    return float(len(completion) % 2)

async def rollout(row, context):
    await asyncio.sleep(0.5)
    if (HERE / "rollout").exists() and not (HERE / "taken").exists():
        (HERE / "taken").touch()
        while (HERE / "rollout").exists():
            await asyncio.sleep(0.05)
    await single_turn(row, context)
"""


async def examined(folder: Path) -> dict[str, str]:
    """Return the doctor's findings: evidence by cause."""
    code, output = await command(folder, "doctor", "--json")
    values = json.loads(output)
    assert code == bool(values["findings"])
    return {finding["cause"]: finding["evidence"] for finding in values["findings"]}


async def named(folder: Path, cause: str, evidence: str, again: Callable[[], object] = lambda: None) -> None:
    """Wait until the doctor finds this, and nothing else."""
    found: dict[str, str] = {}

    async def holds() -> bool:
        nonlocal found
        again()
        found = await examined(folder)
        return found.keys() == {cause} and evidence in found[cause]

    try:
        await until(holds, f"{cause}: {evidence}")
    except BaseException:
        print(found)
        raise


async def went_on(run: Run, what: str) -> None:
    at = len(run.steps())
    await run.reaches(lambda: len(run.steps()) > at + 1, f"two steps after {what}")


async def post(run: Run, address: str, path: str) -> None:
    headers = {"Authorization": f"Bearer {(run.root / 'engine.key').read_text()}"}
    async with (
        aiohttp.ClientSession(address, headers=headers) as session,
        session.post(path, json={"mode": "in_place"}) as answer,
    ):
        assert answer.status == 200


def process_of(run: Run, word: str) -> tuple[int, str]:
    return next((pid, line) for pid, line in run.processes().items() if word in line)


@SLOW
@pytest.mark.nightly
async def test_what_stalls_a_real_run_is_named_one_cause_after_another(tmp_path: Path):
    (tmp_path / "switches.py").write_text(SWITCHES)
    functions = ["reward.function=switches.py:reward", "task.rollout=switches.py:rollout"]
    small = ["buffer.batch_groups=2", "buffer.max_lag=0", "warmup.steps=0", "learner.steps=9000"]
    small += ["learner.trainer=scripted", "learner.scripted_step_s=0.1"]  # no finding follows from a gradient
    async with up(tmp_path, *functions, *small, "supervision.silence_s=90", "learner.checkpoint_every=9000") as run:
        await run.reaches(lambda: len(run.steps()) >= 3, "three steps")
        await until(lambda: well(tmp_path), "nothing is found")
        for switch, cause, evidence in (
            ("reward", "reward hanging", "done before; reward workers have"),
            ("rollout", "straggler", "3 of the 4 trajectories of its group are done"),
        ):
            (tmp_path / switch).touch()
            await named(tmp_path, cause, evidence)
            await run.reaches(lambda: reported_by_supervisor(run, "found", cause), f"the supervisor finds {cause}")  # noqa: B023 - awaited in its turn
            (tmp_path / switch).unlink()
            await went_on(run, cause)

        engine, line = process_of(run, "asyncrl.engine.embedded")
        address = f"http://127.0.0.1:{line.split('--port ')[1].split()[0]}"
        tasks = []
        await named(
            tmp_path,
            "engine paused",
            f"the server at {address} answers",
            # A version that was on its way lets the engine go on.
            lambda: tasks.append(asyncio.ensure_future(post(run, address, "/pause_generation"))),
        )
        await asyncio.gather(*tasks)  # one that came later would pause it again
        await post(run, address, "/continue_generation")
        await went_on(run, "the pause")
        learner, server = run.actor("learner-1"), run.server()
        assert learner is not None and server is not None
        for pid, cause, evidence in (
            (engine, "engine dead", f"the server at {address} has not answered for"),
            (learner, "learner behind", f"process {learner} on {socket.gethostname()} is stopped"),
            (server, "server unreachable", f"NATS at {address_of(run).url} did not answer within"),
        ):
            os.kill(pid, signal.SIGSTOP)
            try:
                await named(tmp_path, cause, evidence)
            finally:
                os.kill(pid, signal.SIGCONT)
            await went_on(run, cause)
        run.interrupt()
        assert await run.ended() == 0, run.story

    assert "reward hanging: reward-1: grades p0" in run.out
    assert "over: reward hanging: reward-1" in run.out
    assert reported_by_supervisor(run, "ended", "straggler")


CLOCK = """
import os
import sys
import time

if "rollout-1" in sys.orig_argv:
    real = time.time
    time.time = lambda: real() - 60 * os.path.exists(os.environ["CLOCK_SWITCH"])
"""  # Python imports a module of this name before anything else


SMALL = ["nats.stream_max_mb=64", "learner.steps=9000", "learner.scripted_step_s=0.2"]


@SLOW
async def test_a_clock_is_named_and_a_missing_permission_ends_the_run_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    monkeypatch.setenv("CLOCK_SWITCH", str(tmp_path / "clock"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    async with up(tmp_path, *SMALL, config=SCRIPTED) as run:
        await run.reaches(lambda: len(run.steps()) > 3, "some steps")
        (tmp_path / "clock").touch()
        await named(tmp_path, "clock off", "60.0 s behind the server's")
        (tmp_path / "clock").unlink()
        await until(lambda: well(tmp_path), "a clock that is right again")

        config = run.root / "nats.conf"
        allowed = f'"{TRAJECTORY_GENERATED.stream.ingest(TRAJECTORY_GENERATED.pattern("short"))}"'
        assert allowed in config.read_text()
        config.write_text(config.read_text().replace(allowed, '"nothing"'))
        server = run.server()
        assert server is not None
        os.kill(server, signal.SIGHUP)  # it reads its configuration again
        assert await run.ended() == 1, run.story  # another try would be refused as well
        await audited_clean(tmp_path)
    denied = "does not allow user 'short-rollout' to publish to _R_.TRAJECTORIES.asyncrl.short.trajectory.generated."
    assert denied in run.error


@SLOW
async def test_a_full_disk_is_named_and_the_run_goes_on_when_it_has_room_again(tmp_path: Path):
    with small_disk(tmp_path / "runs", 944):
        async with up(tmp_path, *SMALL, config=SCRIPTED) as run:
            await run.reaches(lambda: len(run.steps()) > 3, "some steps")
            filler = tmp_path / "runs" / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(1_000_000)):
                    pass
            await named(tmp_path, "disk full", " MB are free")
            filler.unlink()
            await went_on(run, "the disk had room again")
            run.interrupt()
            assert await run.ended() == 0, run.story
            await audited_clean(tmp_path)


async def well(folder: Path) -> bool:
    """Return whether the doctor finds nothing."""
    return not await examined(folder)


@SLOW
async def test_a_run_whose_credit_is_taken_by_very_long_generations_is_a_finding(tmp_path: Path):
    async with up(tmp_path, "engine.scripted_mean_s=600", "engine.scripted_sigma=0", config=SCRIPTED) as run:
        await run.reaches((run.root / "nats.json").exists, "its server")

        later_ns = 11 * MINUTE_NS

        async def named_later() -> bool:
            await asyncio.sleep(0.5)  # a look is work, for the run's server too
            state = await collect_state(address_of(run), "short", run.root)
            state.opened_ns -= later_ns
            for actor in state.actors.values():
                actor.starts = [start - later_ns for start in actor.starts]
            return [finding.cause for finding in diagnose(state)] == ["no credit"]

        await until(named_later, "it names credit eleven minutes after the start", 180)
        run.interrupt()
        assert await run.ended() == 0, run.story


@SLOW
async def test_a_run_whose_data_ends_before_its_steps_is_a_finding_and_goes_on_with_more(tmp_path: Path):
    (tmp_path / "flat.py").write_text(FLAT)
    rows = [{"prompt": "^ab=", "label": "flat" if number < 4 else "ba"} for number in range(48)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = [
        "task.source=rows.jsonl",
        "task.epochs=1",
        "task.options={}",
        "learner.steps=6",
        "learner.checkpoint_every=1",
        "learner.keep_versions=10",
        "buffer.max_lag=8",  # else some groups may become too old, and fewer batches come of the rows
    ]
    rewards = ["reward.function=flat.py:reward", "learner.filters=['zero_variance']", "warmup.steps=0"]
    async with up(tmp_path, *few, *rewards, config=SCRIPTED) as run:
        await run.reaches(lambda: len(run.steps()) == 5, "all batches that there are")
        await named(tmp_path, "end of data", "every row was issued 1 time; 4 groups left, and a batch takes 8")
        run.interrupt()
        assert await run.ended() == 0, run.story
    async with resume(tmp_path, "short", "--set", "task.epochs=2") as run:
        assert await run.ended() == 0, run.story
    await audited_clean(tmp_path)


def reported_by_supervisor(run: Run, what: str, cause: str) -> bool:
    found = [line["cause"] for line in run.events("supervisor-1") if line["event"] == f"stall.{what}"]
    return cause in found


async def test_a_version_that_cannot_be_loaded_is_named(bus: Bus, server: EmbeddedServer, stage: Callable[..., Stage]):
    scene = stage()
    scene.make_model()
    await publish(bus, RunOpened(9, 0, msgspec.to_builtins(scene.config)))
    await publish(bus, FleetScaled({"engine": 1}), headers={"writer": "test"})
    folder = scene.files.weights / "nowhere"
    version = WeightsPublished(0, 7, "d", "files", str(folder))
    await publish(bus, version, headers={"writer": "test"})
    process = await scene.start("engine")

    async def refused() -> bool:
        return await read_last(bus, WEIGHTS_REFUSED, "engine-1") is not None

    await until(refused, "the engine asks once more")
    record = await read_last(bus, WEIGHTS_REFUSED, "engine-1")
    assert record is not None
    answered = (await read(bus, WeightsRefused, record)).sequence
    await publish(
        bus, msgspec.structs.replace(version, answers=answered), headers={"writer": "test", MESSAGE_ID: "again"}
    )
    await asyncio.wait_for(process.wait(), 120)

    state = await collect_state(server.address, bus.run, scene.files.root)

    [finding] = diagnose(state)
    assert (finding.cause, finding.object) == ("version not loaded", "engine-1")
    assert "it does not take version 7, it had none before" in finding.evidence
    assert str(folder) in finding.evidence


async def test_clocks_and_letters_are_read_from_the_topics(bus: Bus, server: EmbeddedServer):
    await publish(bus, RunOpened(9, 0, msgspec.to_builtins(Config())))
    await publish(bus, FleetScaled({"rollout": 1}), headers={"writer": "test"})
    await publish(bus, ActorStarted("rollout", "rollout-1", "elsewhere", 7))
    vitals = Vitals("rollout", "rollout-1", 7, time.time() - 60, {"held": 3.0}, v=Vitals.V)
    await bus.send(VITALS_TAKEN.ingest(bus.run, "rollout-1"), msgspec.json.encode(vitals))
    letter = DeadLetter("trajectory.graded", "GRADES", 3, "not a TrajectoryGraded", {}, b"x")
    await publish(bus, letter)

    state = await collect_state(server.address, bus.run, None)

    letters, clock = diagnose(state)
    assert (letters.cause, clock.cause, clock.object) == ("dead letters", "clock off", "rollout-1")
    assert re.match(r"1 in all; the last \d+ s ago, trajectory.graded: not a TrajectoryGraded", letters.evidence)
    assert re.fullmatch(r"the clock of elsewhere is (59|60)\.\d s behind the server's", clock.evidence)
    assert state.actors["rollout-1"].gauge("held") == 3.0


async def test_a_stream_without_room_is_named(connect: Connect, server: EmbeddedServer):
    bus = await connect("full")
    await provision(bus, equal_sizes(payload_mb=64, ledger_mb=1), lease_s=10)
    await publish(bus, RunOpened(9, 0, msgspec.to_builtins(Config())))
    rows = [PromptRow("x" * 9000)]
    for number in range(107):
        message = PromptIssued(f"p{number:06d}", 0, 1, rows)
        await publish(bus, message, headers={"writer": "test"})

    state = await collect_state(server.address, "full", None)

    [finding] = diagnose(state)
    assert (finding.cause, finding.object) == ("stream full", "PROMPTS")
    assert finding.evidence.startswith("1.0 of 1 MB are used by 107 messages")


async def test_a_user_without_permission_gets_an_error_that_names_it(server: EmbeddedServer):
    address = msgspec.structs.replace(server.address, password="of-another-server")

    [finding] = diagnose(await collect_state(address, "demo", None))

    assert finding.cause == "permission missing"
    assert "refused" in finding.evidence
