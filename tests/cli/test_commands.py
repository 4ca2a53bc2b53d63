"""Commands from another terminal, against a real server with hand-said messages."""

import asyncio
import fcntl
import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import WRITER, publish
from asyncrl.run.connect import SUPERVISOR, connected
from asyncrl.run.find import FoundRun, RunNotFound
from asyncrl.state.conditions import read_condition
from asyncrl.state.format_message import FormattedMessage, as_json, as_line
from asyncrl.state.live_tap import LiveTap, Pattern
from asyncrl.state.status import run_status
from asyncrl.state.watch import read_state
from harness.stage import until
from topics.actors import (
    ACTOR_STOPPED,
    SCALE_REQUESTED,
    STOP_REQUESTED,
    ActorStarted,
    ActorStopped,
    FleetScaled,
    ScaleRequested,
)
from topics.batches import BATCH_TRAINED, BatchPacked, BatchTrained
from topics.topic import ACTORS
from topics.trajectories import TRAJECTORY_GENERATED, TRAJECTORY_GRADED, Segment, TrajectoryGenerated, VersionCount
from topics.wire import decode, encode

WRITTEN = {WRITER: "a keeper"}  # on the log of one keeper


def generated(name: str = "p000042-3", length: int = 11) -> TrajectoryGenerated:
    zeros = np.zeros(length, np.float32)
    segment = Segment(
        tokens=np.arange(length, dtype=np.int32),
        mask=np.ones(length, np.uint8),
        logprobs=zeros,
        versions=zeros.astype(np.int32),
    )
    return TrajectoryGenerated(
        trajectory_id=name,
        prompt_id=name.split("-")[0],
        member=3,
        group_size=8,
        stage="rl",
        rows=[],
        segments=[segment],
        completion="hello world",
        versions=[VersionCount(0, length)],
    )


def trained(step: int) -> BatchTrained:
    return BatchTrained(
        step=step,
        lineage=0,
        stage="rl",
        metrics={"train_s": float(step), "wait_s": 0.5},
        lags={0: 60, 1: 40},
        masked=0,
        rewards=[0.5, 0.1],
        trajectories=8,
        batch_sequence=step,
    )


async def say_started(bus: Bus, actor_id: str) -> None:
    message = ActorStarted(actor_id.rsplit("-", 1)[0], actor_id, "here", 1)
    await publish(bus, message)


async def say_stopped(bus: Bus, actor_id: str) -> None:
    message = ActorStopped(actor_id.rsplit("-", 1)[0], actor_id)
    await publish(bus, message)


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
        async with asyncio.timeout(20):
            out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()

    async def start(self, *words: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "asyncrl.cli.main", *words, cwd=self.folder, stdout=pipe, stderr=pipe
        )


@pytest.fixture
async def terminal(tmp_path, bus, server):
    await say_started(bus, SUPERVISOR)
    terminal = Terminal(tmp_path, bus, server)
    yield terminal
    terminal.lock.close()


@pytest.fixture
def found(bus, server) -> FoundRun:
    return FoundRun(bus.run, None, server.address)


async def test_status_reads_everything_from_the_topics(bus):
    await say_started(bus, SUPERVISOR)
    await say_started(bus, "rollout-1")
    for step in (1, 2):
        packed = BatchPacked(step, "rl", [], 0, {}, {"truncated_share": step / 4, "reward/format": 0.5})
        await publish(bus, packed, headers=WRITTEN)
        await publish(bus, trained(step), headers=WRITTEN)

    state = await read_state(bus)
    values = json.loads(msgspec.json.encode(run_status(state, state.last_ns)))

    assert (values["state"], values["step"], values["reward"]) == ("running", 2, 0.5)
    assert values["metrics"] == {"train_s": 2.0, "wait_s": 0.5, "truncated_share": 0.5, "reward/format": 0.5}
    assert values["mean_lag_versions"] == 0.4
    assert values["queues"]["rollout"]["waiting"] == 0
    assert [actor["actor_id"] for actor in values["actors"]] == [SUPERVISOR, "rollout-1"]


async def test_status_counts_what_it_cannot_read(bus):
    await bus.store(BATCH_TRAINED.subject(bus.run), b"\xc1", {"Nats-Msg-Id": "broken"})

    state = await read_state(bus)

    assert state.dead.count == 1
    assert "number 1 of TRAINING" in state.dead.last


async def test_status_finds_the_newest_live_run_by_itself(bus, terminal):
    await publish(bus, trained(7), headers=WRITTEN)

    code, picture, _ = await terminal.type("status")
    _, values, _ = await terminal.type("status", bus.run, "--json")

    assert code == 0
    assert bus.run in picture
    assert json.loads(values)["step"] == 7


async def test_a_server_without_the_run_is_named(server):
    with pytest.raises(RunNotFound, match="holds no run called other"):
        async with connected(FoundRun("other", None, server.address), "test"):
            pass


async def test_a_run_whose_directory_is_not_held_is_over(terminal, bus):
    terminal.lock.close()

    code, _, message = await terminal.type("tap", bus.run, "*")

    assert code == 1
    assert f"run {bus.run} is over" in message


async def test_a_run_whose_supervisor_left_is_over(bus, found):
    await say_started(bus, SUPERVISOR)
    await say_stopped(bus, SUPERVISOR)

    with pytest.raises(RunNotFound, match="is over"):
        async with connected(found, "test"):
            pass


async def test_down_asks_and_waits_until_the_run_has_ended(bus, terminal):
    process = await terminal.start("down")
    await until(lambda: _is_said(bus, STOP_REQUESTED.subject(bus.run)), "the request to stop")
    await say_stopped(bus, SUPERVISOR)
    terminal.lock.close()
    out, _ = await process.communicate()

    assert process.returncode == 0
    assert out.decode().splitlines() == [f"asked run {bus.run} to stop", f"run {bus.run} has ended"]


async def test_down_reports_a_run_that_does_not_end_in_time(bus, terminal):
    code, _, message = await terminal.type("down", "--wait", "0.5")

    assert code == 1
    assert "has not ended within" in message


async def test_scale_asks_and_waits_until_as_many_live(bus, terminal):
    await say_started(bus, "rollout-1")
    process = await terminal.start("scale", "rollout=2")
    await until(lambda: _is_said(bus, SCALE_REQUESTED.subject(bus.run)), "the request to scale")
    asked = await read_last(bus, ACTORS, SCALE_REQUESTED.subject(bus.run))
    await publish(bus, FleetScaled({"rollout": 2}), headers=WRITTEN)
    await say_started(bus, "rollout-2")
    out, _ = await process.communicate()

    assert asked is not None
    assert decode(ScaleRequested, asked.data).wanted == {"rollout": 2}
    assert (process.returncode, out.decode()) == (0, "scaled: rollout 2\n")


async def test_scale_reports_how_far_it_came(bus, terminal):
    await say_started(bus, "rollout-1")

    code, _, message = await terminal.type("scale", "rollout=3", "--wait", "0.3")

    assert code == 1
    assert "rollout 1 of 3" in message


async def test_tap_prints_what_is_published_while_it_runs_and_ends_after_count(bus, terminal):
    process = await terminal.start("tap", "trajectory.generated", "--count", "2", "--where", "prompt_id=p00000[12]")
    number = 0

    async def speak() -> bool:
        nonlocal number
        await publish(bus, generated(f"p{number % 4:06}-0", 11 + number))
        number += 1
        return process.returncode is not None

    await until(speak, "the end of the tap")
    out, err = await process.communicate()

    lines = out.decode().splitlines()
    assert len(lines) == 2
    assert all("trajectory.generated p00000" in line and "tokens=int32[" in line for line in lines)
    assert err.decode() == "2 shown, 0 missed\n"


async def test_tap_from_the_start_reads_the_log_and_gives_whole_arrays_as_json(bus, terminal):
    for name in ("p000001-0", "p000002-0"):
        await publish(bus, generated(name))
    await bus.store(TRAJECTORY_GENERATED.subject(bus.run, "p000003-0"), b"\xc1", {"Nats-Msg-Id": "broken"})

    _, out, err = await terminal.type("tap", "trajectory.*", "--from-start", "--json", "--count", "3")

    first, second, broken = (json.loads(line) for line in out.splitlines())
    assert first["message"]["segments"][0]["tokens"] == list(range(11))
    assert second["headers"]["trajectory"] == "p000002-0"
    assert broken["message"] is None
    assert broken["instead"].startswith("undecodable: not a TrajectoryGenerated")
    assert err == "3 shown, 0 missed\n"


async def test_tap_ends_with_the_run(bus, terminal):
    process = await terminal.start("tap", "actor.stopped")

    async def leave() -> bool:
        await bus.send(ACTOR_STOPPED.ingest(bus.run, SUPERVISOR), encode(ActorStopped("supervisor", SUPERVISOR)))
        return process.returncode is not None

    # The lock is checked before it connects; once it listens, one word of the supervisor is enough.
    assert process.stderr is not None
    await until(leave, "the end of the tap")
    assert (await process.stderr.read()).decode().startswith((f"run {bus.run} has ended", f"run {bus.run} is over"))


async def test_a_tap_that_cannot_keep_up_counts_what_it_missed(bus):
    tap = LiveTap(bus, Pattern("batch.trained"), most=10)
    await tap.start()
    for step in range(1, 51):
        await bus.send(BATCH_TRAINED.ingest(bus.run), encode(trained(step)))

    await until(lambda: tap.missed + tap.waiting == 50, "fifty messages")
    assert tap.missed == 40
    assert [tapped.message.step for tapped in tap.take()] == list(range(1, 11))
    await tap.close()


async def test_a_tap_is_bounded_in_bytes_too(bus):
    tap = LiveTap(bus, Pattern("trajectory.*"), most_bytes=10_000)
    await tap.start()
    for _ in range(20):
        await bus.send(TRAJECTORY_GENERATED.ingest(bus.run, "p000001-0"), encode(generated(length=200)))

    await until(lambda: tap.missed + tap.waiting == 20, "twenty messages")
    assert tap.missed > 0
    await tap.close()


def tapped(
    topic=TRAJECTORY_GENERATED, key: str = "p000042-3", data: bytes | None = None, **headers: str
) -> FormattedMessage:
    body = encode(generated()) if data is None else data
    return FormattedMessage(topic.subject("demo", key), headers, body, 1_700_000_000_123_000_000)


def test_a_line_shows_every_field_and_shortens_arrays():
    line = as_line(tapped())

    assert line.split(" ", 1)[1] == (
        "trajectory.generated p000042-3  rows=[] "
        "segments=[{tokens=int32[11] 0 1 2 3 4 5 6 7 ... mask=uint8[11] 1 1 1 1 1 1 1 1 ... "
        "logprobs=float32[11] 0 0 0 0 0 0 0 0 ... versions=int32[11] 0 0 0 0 0 0 0 0 ...}] "
        "completion='hello world' versions=[{version=0 tokens=11}] truncated=False "
        "lineages=[] discarded=0 outcome=None hybrid=False trajectory_id=p000042-3 attempt=0 delivery=1 "
        "prompt_id=p000042 member=3 group_size=8 stage=rl task=task"
    )


def test_what_cannot_be_read_is_shown_as_such():
    unknown = FormattedMessage("asyncrl.demo.new.thing", {}, b"12345", 0)
    elsewhere = tapped(data=b"", blob="abc:2000000:ff:3")

    assert "undecodable: not a TrajectoryGraded" in as_line(tapped(TRAJECTORY_GRADED, data=b"\xc1"))
    assert "5 bytes on a subject that is in no row" in as_line(unknown)
    assert "2000000 bytes in 3 chunks" in as_line(elsewhere)
    assert json.loads(as_json(unknown))["message"] is None


@pytest.mark.parametrize(
    ("word", "holds"),
    [
        ("stage=rl", True),
        ("stage=warmup", False),
        ("member=3", True),
        ("member=3.0", True),
        ("member=x", False),
        ("truncated=false", True),
        ("trajectory_id=p000042-*", True),
        ("offset=7", True),  # a header
        ("nothing=1", False),
        ("completion=hello*", True),
    ],
)
def test_conditions_look_at_fields_and_headers(word, holds):
    assert read_condition(word).holds(tapped(offset="7")) is holds


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("trajectory.*", ["trajectory.graded.p1-0", "trajectory.failed.p1-0"]),
        ("trajectory", ["trajectory.graded.p1-0", "trajectory.failed.p1-0"]),
        ("*.trained", ["batch.trained"]),
        ("trajectory.graded.p1-*", ["trajectory.graded.p1-0"]),
        ("batch.trained", ["batch.trained"]),
        ("*", ["trajectory.graded.p1-0", "trajectory.failed.p1-0", "batch.trained", "new.thing"]),
    ],
)
def test_a_pattern_names_topics_and_keys(pattern, matched):
    subjects = ["trajectory.graded.p1-0", "trajectory.failed.p1-0", "batch.trained", "new.thing"]

    assert [subject for subject in subjects if Pattern(pattern).matches(f"asyncrl.demo.{subject}")] == matched


async def test_logs_are_merged_by_time_and_filtered_by_level(terminal):
    for number, (actor, level) in enumerate((("rollout-1", "info"), ("learner-1", "warning"), ("rollout-1", "error"))):
        line = {"event": f"event {number}", "level": level, "actor": actor, "timestamp": f"2026-01-01T00:00:0{number}Z"}
        with (terminal.logs / f"{actor}.log").open("a") as file:
            file.write(json.dumps({**line, "step": number}) + "\n")
    (terminal.logs / "engine-1.server.log").write_text("words of a library\n")
    (terminal.logs / "reward-1.log").touch()
    terminal.lock.close()

    _, everything, _ = await terminal.type("logs")
    _, loud, _ = await terminal.type("logs", "rollout", "--level", "warning", "--follow")
    _, nothing, note = await terminal.type("logs", "reward-1")
    assert (nothing, note.endswith("nothing was logged by reward-1\n")) == ("", True)
    code, _, message = await terminal.type("logs", terminal.logs.parent.name, "nobody")

    assert [line.split(maxsplit=2)[-1].split("  ")[0] for line in everything.splitlines()[1:]] == [
        "event 0",
        "warning event 1",
        "error event 2",
    ]
    assert "words of a library" in everything.splitlines()[0]
    assert [line.split(maxsplit=1)[1] for line in loud.splitlines()] == ["rollout-1    error event 2  step=2"]
    assert code == 1
    assert "there are: engine-1.server, learner-1, reward-1, rollout-1" in message


async def _is_said(bus: Bus, subject: str) -> bool:
    return await read_last(bus, ACTORS, subject) is not None
