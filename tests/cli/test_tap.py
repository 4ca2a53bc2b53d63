"""`asyncrl tap`: what it prints, which messages it takes, and that it never holds up a run."""

import json

import pytest

from asyncrl.bus.publish import WRITER, publish
from asyncrl.errors import WrongUsage
from asyncrl.run.connect import SUPERVISOR
from asyncrl.state.format_message import FormattedMessage, as_json, as_line
from asyncrl.state.live_tap import LiveTap, Pattern, read_condition
from harness.published_messages import generated, trained
from harness.stage import until
from topics.actors import (
    ACTOR_STOPPED,
    ActorStopped,
)
from topics.batches import BATCH_TRAINED
from topics.trajectories import TRAJECTORY_GENERATED, TRAJECTORY_GRADED
from topics.wire import encode

WRITTEN = {WRITER: "a keeper"}  # on the log of one keeper


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
    assert [formatted.message.step for formatted in tap.take()] == list(range(1, 11))
    await tap.close()


async def test_a_tap_is_bounded_in_bytes_too(bus):
    tap = LiveTap(bus, Pattern("trajectory.*"), most_bytes=10_000)
    await tap.start()
    for _ in range(20):
        await bus.send(TRAJECTORY_GENERATED.ingest(bus.run, "p000001-0"), encode(generated(length=200)))

    await until(lambda: tap.missed + tap.waiting == 20, "twenty messages")
    assert tap.missed > 0
    await tap.close()


def formatted(
    topic=TRAJECTORY_GENERATED, key: str = "p000042-3", data: bytes | None = None, **headers: str
) -> FormattedMessage:
    body = encode(generated()) if data is None else data
    return FormattedMessage(topic.subject("demo", key), headers, body, 1_700_000_000_123_000_000)


def test_a_line_shows_every_field_and_shortens_arrays():
    line = as_line(formatted())

    assert line.split(" ", 1)[1] == (
        "trajectory.generated p000042-3  rows=[] "
        "segments=[{tokens=int32[11] 0 1 2 3 4 5 6 7 ... mask=uint8[11] 1 1 1 1 1 1 1 1 ... "
        "logprobs=float32[11] 0 0 0 0 0 0 0 0 ... versions=int32[11] 0 0 0 0 0 0 0 0 ... turns=[] "
        "hinted=[]}] "
        "completion='hello world' versions=[{version=0 tokens=11}] truncated=False "
        "lineages=[] discarded=0 verified=0 passes=0 outcome=None hybrid=False secret='' routing=None spans='' "
        "trajectory_id=p000042-3 attempt=0 delivery=1 prompt_id=p000042 member=3 group_size=8 stage=rl task=task"
    )


def test_what_cannot_be_read_is_shown_as_such():
    unknown = FormattedMessage("asyncrl.demo.new.thing", {}, b"12345", 0)
    elsewhere = formatted(data=b"", blob="abc:2000000:ff:3")

    assert "undecodable: not a TrajectoryGraded" in as_line(formatted(TRAJECTORY_GRADED, data=b"\xc1"))
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
    assert read_condition(word).holds(formatted(offset="7")) is holds


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("trajectory.*", ["trajectory.graded.p1-0", "trajectory.failed.p1-0"]),
        ("trajectory", ["trajectory.graded.p1-0", "trajectory.failed.p1-0"]),
        ("*.trained", ["batch.trained"]),
        ("trajectory.graded.p1-*", ["trajectory.graded.p1-0"]),
        ("batch.trained", ["batch.trained"]),
        ("*", ["trajectory.graded.p1-0", "trajectory.failed.p1-0", "batch.trained", "new.thing"]),
        ("buffer.heartbeat", ["buffer.heartbeat"]),
        ("buffer.*", []),  # a heartbeat says nothing
    ],
)
def test_a_pattern_names_topics_and_keys(pattern, matched):
    subjects = ["trajectory.graded.p1-0", "trajectory.failed.p1-0", "batch.trained", "new.thing", "buffer.heartbeat"]

    assert [subject for subject in subjects if Pattern(pattern).matches(f"asyncrl.demo.{subject}")] == matched


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (
            "batch.traind",
            "'batch.traind'; expected batch.trained, batch.packed, or another that `asyncrl topics` lists",
        ),
        ("xyz", "'xyz'; expected one that `asyncrl topics` lists"),
    ],
)
def test_a_pattern_that_names_no_topic_is_refused_with_those_like_it(pattern, expected):
    with pytest.raises(WrongUsage) as error:
        Pattern(pattern)
    assert str(error.value) == f"no topic is called {expected}"
