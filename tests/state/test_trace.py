"""Traces are valid in the Trace Event Format, and their slices have the times of the messages."""

import json
from typing import Any

import msgspec

from asyncrl.state.trace import TraceFold
from harness.folds import NO_PAYLOAD, Feed
from harness.published_messages import trained
from topics.actors import ActorStarted, ActorStopped
from topics.batches import BatchGroup, BatchMember, BatchPacked
from topics.engines import EngineReady, EngineUpdating
from topics.trajectories import TrajectoryGenerated
from topics.weights import CheckpointSaved


def check_format(trace: dict[str, Any]) -> None:
    """Check the rules of the format for the phases that are used; slices of a thread must nest."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    open_slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "M":
            assert event["name"] == "process_name" and isinstance(event["args"]["name"], str)
        elif event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values())
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        else:
            assert event["ph"] == "X" and event["dur"] >= 0
            begin, end = event["ts"], event["ts"] + event["dur"]
            around = open_slices.setdefault((event["pid"], event["tid"]), [])
            while around and around[-1][1] <= begin + 1e-3:
                around.pop()
            assert not around or end <= around[-1][1] + 1e-3, event
            around.append((begin, end))


def member(name: str) -> BatchMember:
    return BatchMember(name, 0, NO_PAYLOAD, 1.0, 16)


def fed(most: int = 100) -> dict[str, Any]:
    feed = Feed(TraceFold(most))
    for actor_id in ("learner-1", "engine-1"):
        feed.publish(ActorStarted(actor_id.rsplit("-", 1)[0], actor_id, "here", 1), at_s=10.0)
    feed.issued("p000001-0", at_s=11.0).issued("p000001-1", at_s=11.0).issued("p000002-0", at_s=20.5)
    feed.graded("p000001-0", at_s=13.0)
    feed.graded("p000001-1", at_s=14.0)
    feed.publish(EngineUpdating("engine-1", 0, 1), at_s=14.0)
    feed.publish(EngineReady("engine-1", "http://here:1", 0, 1, "made", 16), at_s=15.5)
    group = BatchGroup("p000001", [member("p000001-0"), member("p000001-1")])
    feed.publish(BatchPacked(1, "rl", [group], 0), at_s=16.0)
    feed.publish(trained(1), at_s=20.0)
    feed.publish(CheckpointSaved(0, 1, "00", "checkpoints/1", 1), at_s=20.0)
    feed.publish(trained(2), at_s=20.5)  # claims 2 s of training: more than there were
    feed.publish(ActorStopped("engine", "engine-1", "out of memory"), at_s=21.0)
    return json.loads(msgspec.json.encode(feed.fold.trace("mine")))


def test_a_trace_is_valid_in_the_trace_event_format():
    trace = fed()

    check_format(trace)
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "C", "M", "i"}


def test_slices_have_the_times_of_the_messages():
    events = fed()["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    slices = {
        (names[event["pid"]], event["tid"], event["name"]): (event["ts"] / 1e6, event["dur"] / 1e6)
        for event in events
        if event["ph"] == "X"
    }

    assert slices["trajectories", 0, "p000001-0"] == (1.0, 5.0)
    assert slices["trajectories", 1, "p000001-1"] == (1.0, 5.0)
    assert slices["trajectories", 1, "grade"] == (1.0, 3.0)  # its tokens are trimmed: no time of its sampling
    assert slices["trajectories", 0, "wait for batch"] == (3.0, 3.0)
    assert slices["trajectories", 0, "p000002-0"] == (10.5, 0.5)  # open until the last message
    assert slices["engine-1", 2, "update of weights"] == (4.0, 1.5)
    assert slices["engine-1", 1, "engine-1"] == (0.0, 11.0)
    assert slices["learner-1", 2, "train batch 1"] == (9.0, 1.0)
    assert slices["learner-1", 2, "train batch 2"] == (10.0, 0.5)


def test_a_trajectory_shows_its_queue_and_what_its_worker_did():
    feed = Feed(TraceFold(100)).issued("p000001-0", at_s=10.0)
    generated = TrajectoryGenerated(
        trajectory_id="p000001-0",
        prompt_id="p000001",
        member=0,
        group_size=2,
        stage="rl",
        rows=[],
        segments=[],
        completion="",
        versions=[],
        spans="generate:2.5,hold:1,tool:0.5",
    )
    feed.publish(generated, at_s=15.0)
    feed.graded("p000001-0", at_s=16.0)

    trace = json.loads(msgspec.json.encode(feed.fold.trace("mine")))

    slices = {
        event["name"]: (event["ts"] / 1e6, event["dur"] / 1e6) for event in trace["traceEvents"] if "dur" in event
    }
    assert slices == {
        "p000001-0": (0.0, 6.0),
        "queue": (0.0, 1.0),
        "generate": (1.0, 2.5),
        "hold": (3.5, 1.0),
        "tool": (4.5, 0.5),
        "grade": (5.0, 1.0),
    }
    check_format(trace)


def test_only_the_newest_trajectories_are_held():
    trace = fed(most=1)

    assert trace["otherData"]["trajectories_left_out"] == 2
    assert {event["name"] for event in trace["traceEvents"] if event.get("cat")} == {"p000002-0"}
