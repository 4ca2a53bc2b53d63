"""The recorder goes on from its files: no row is lost or doubled, wherever it was killed, and none is made twice."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from actors.recorder.actor import main
from actors.recorder.fold import RecorderFold
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish
from asyncrl.state.health_checks import UNWRITTEN
from asyncrl.state.summary import summary_rows
from harness.disks import leave_free, small_disk
from harness.folds import NO_PAYLOAD, Feed, failure
from harness.stage import Stage, until
from topics.actors import ACTOR_STOPPED, RUN_OPENED, VITALS_TAKEN, ActorStopped, RunOpened, Vitals
from topics.batches import (
    Anomaly,
    BatchGroup,
    BatchMember,
    BatchPacked,
    BatchTrained,
    Carrier,
    Objective,
)
from topics.engines import EngineReady
from topics.evals import EvalScored
from topics.gpu_handoff import CardReturned, CardTaken
from topics.groups import GroupDropped
from topics.turns import FeedbackGiven, TurnFinished, TurnJudged

BY_KEEPER = {"writer": "test"}
MARK = b'{"event":"mark"}'


class Scene:
    """A recorder of a run whose steps the test publishes."""

    def __init__(self, stage: Stage, bus: Bus) -> None:
        self.stage, self.bus = stage, bus
        root = stage.files.root
        self.metrics, self.state, self.summary = root / "metrics.jsonl", root / "recorder.json", root / "summary.json"

    async def steps(self, first: int, last: int) -> None:
        """Steps as buffer and learner publish them."""
        for step in range(first, last + 1):
            packed = BatchPacked(step, "rl", [], 0, Objective(), {"response_tokens_mean": float(step)})
            trained = BatchTrained(step, 0, "rl", {"loss": 0.5}, {0: 10, 1: step}, 0, [0.1 * step, 0.1], 8, step)
            dropped = GroupDropped(f"p{step:06d}", "failed", tokens=step)
            scored = EvalScored(f"e{step:06d}", step, {step: 3}, 0.5, 3, 0, 1.0)
            await publish(self.bus, packed, headers=BY_KEEPER)
            await publish(self.bus, dropped, headers=BY_KEEPER)
            await publish(self.bus, trained, headers=BY_KEEPER)
            await publish(self.bus, scored, headers=BY_KEEPER)

    async def record(self) -> tuple[bytes, bytes]:
        """One life of a recorder that is asked to stop at once; returns its rows and its summary."""
        context = self.stage.context("recorder", self.bus)
        context.stop.set()
        await main(context)
        return self.metrics.read_bytes(), self.summary.read_bytes()

    def trained(self) -> list[int]:
        """Steps of the rows that are whole."""
        lines = self.metrics.read_text().split("\n")[:-1] if self.metrics.exists() else []
        return [row["step"] for row in map(json.loads, lines) if row["event"] == "step"]


@pytest.fixture
async def scene(bus: Bus, stage: Callable[..., Stage]) -> Scene:
    made = Scene(stage(supervision={"snapshot_every": 7}, recorder={"plot": False}), bus)
    await publish(bus, RunOpened(12, 0, {}))
    return made


async def test_a_recorder_goes_on_wherever_the_one_before_was_killed(scene: Scene):
    await scene.steps(1, 6)
    early, _ = await scene.record()
    stored = scene.state.read_bytes()
    await scene.steps(7, 12)
    whole = await scene.record()
    scene.state.unlink()
    assert sorted(whole[0].splitlines()) == sorted((await scene.record())[0].splitlines())
    later = whole[0].removeprefix(early)
    assert whole[0] != later

    places = {
        "before it wrote": (stored, early),
        "inside a row": (stored, early + later[: len(later) // 2]),
        "before it stored its position": (stored, whole[0]),
        "before its first position": (None, whole[0][:-3]),
        "by a fault that left half a position": (stored[:-9], whole[0]),
        "and rows were removed": (stored, early[:-9]),
    }
    for place, (state, rows) in places.items():
        scene.state.unlink() if state is None else scene.state.write_bytes(state)
        scene.state.with_suffix(".new").write_bytes(stored[:5])
        scene.metrics.write_bytes(rows)
        found, summary = await scene.record()
        assert sorted(found.splitlines()) == sorted(whole[0].splitlines()), place
        assert summary == whole[1], place


async def test_a_recorder_reads_nothing_again_that_its_rows_hold(scene: Scene):
    await scene.steps(1, 6)
    rows, _ = await scene.record()
    first = next(row for row in rows.split(b"\n") if b'"event":"step"' in row)
    scene.metrics.write_bytes(rows.replace(first, MARK.ljust(len(first))))
    await scene.steps(7, 8)

    found, _ = await scene.record()

    assert MARK in found
    assert scene.trained() == [2, 3, 4, 5, 6, 7, 8]


async def test_a_run_that_only_serves_lasts_until_its_actors_have_stopped(scene: Scene):
    opened = await read_last(scene.bus, RUN_OPENED)
    lasted_s, number = 0.0, 0
    while lasted_s < 0.1:  # seconds of the server's clock
        number += 1  # the server drops a second message of one actor
        await publish(scene.bus, ActorStopped("engine", f"engine-{number}"))
        stopped = await read_last(scene.bus, ACTOR_STOPPED, f"engine-{number}")
        assert opened is not None and stopped is not None
        lasted_s = (stopped.time_ns - opened.time_ns) / 1e9

    _, summary = await scene.record()

    assert json.loads(summary)["wall_s"] == pytest.approx(lasted_s, abs=0.011)  # it is rounded


async def test_files_of_other_logs_are_not_gone_on_from(scene: Scene):
    await scene.steps(1, 6)
    await scene.record()
    recorded = msgspec.json.decode(scene.state.read_bytes())
    recorded["positions"]["BATCHES"] += 1  # behind the end of this run's log
    scene.state.write_bytes(msgspec.json.encode(recorded))
    scene.metrics.write_bytes(scene.metrics.read_bytes().replace(b'"step":6,', b'"step":9,'))

    await scene.record()

    assert scene.trained() == [1, 2, 3, 4, 5, 6]


async def test_rows_of_a_recorder_that_is_killed_again_and_again_are_whole(scene: Scene):
    for life in range(1, 4):
        process = await scene.stage.start("recorder")
        await scene.steps(4 * life - 3, 4 * life)
        await until(lambda at=4 * life: at - 1 in scene.trained(), "it writes rows")
        process.kill()
        await process.wait()

    await scene.record()

    assert scene.trained() == [*range(1, 13)]
    assert scene.metrics.read_bytes().count(b'"event":"eval"') == 12


async def test_a_recorder_whose_disk_is_full_lives_and_writes_what_is_missing_once_there_is_room(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    with small_disk(tmp_path / "run-0", 4):
        scene = Scene(stage(supervision={"snapshot_every": 7}, recorder={"plot": False}), bus)
        await publish(bus, RunOpened(12, 0, {}))
        process = await scene.stage.start("recorder")

        async def unwritten() -> bool:
            record = await read_last(bus, VITALS_TAKEN, "recorder-1")
            values = msgspec.json.decode(record.data, type=Vitals).values if record is not None else {}
            return values.get(UNWRITTEN) == errno.ENOSPC

        await scene.steps(1, 3)
        await until(lambda: 2 in scene.trained(), "it writes rows")
        leave_free(tmp_path / "run-0", 0)
        await scene.steps(4, 40)
        await until(unwritten, "it reports the full disk")
        assert process.returncode is None
        (tmp_path / "run-0" / "filler").unlink()
        await until(lambda: scene.trained() == [*range(1, 41)], "it has written what was missing")

        leave_free(tmp_path / "run-0", 0)
        await scene.steps(41, 80)
        await until(unwritten, "it reports the full disk again")
        process.terminate()
        assert await process.wait() == 0
        assert not scene.summary.exists()
        (tmp_path / "run-0" / "filler").unlink()
        await scene.record()
        assert scene.trained() == [*range(1, 81)]
        await scene.stage.stop()


def test_the_time_for_which_a_run_lay_stopped_is_no_time_of_the_run():
    fold = RecorderFold()
    feed = Feed(fold)
    feed.publish(RunOpened(12, 0, {}), at_s=100.0)
    for step, at_s in ((1, 110.0), (2, 430.0)):
        if step == 2:
            feed.publish(RunOpened(12, 0, {}), at_s=400.0)
            feed.publish(failure("p000001-0"), at_s=120.0)  # of another log, read later
        groups = [BatchGroup("p000001", [BatchMember("p000001-0", 0, NO_PAYLOAD, 1.0, 400)])]
        feed.publish(BatchPacked(step, "rl", groups, 0, Objective(), {}), at_s=at_s)
        feed.publish(BatchTrained(step, 0, "rl", {}, {0: 400}, 0, [1.0, 0.0], 1, step), at_s=at_s)
        feed.publish(EvalScored(f"e{step:06d}", step, {step: 3}, 0.5, 3, 0, 1.0), at_s=at_s)

    summary = fold.summary("demo", [])

    assert (summary["wall_s"], summary["stopped_s"]) == (50.0, 280.0)
    shown = dict(summary_rows(summary | {"metrics": ""}))
    assert shown["wall time"] == "330.0 s, of which RL 40.0 s and 280.0 s stopped"
    assert [(row["event"], row["time_s"]) for row in fold.rows] == [
        *[("step", 10.0), ("eval", 10.0)],
        *[("step", 50.0), ("eval", 50.0)],
    ]
    assert fold.rows[2]["throughput/tokens_per_s"] == 10.0  # 400 tokens in 40 s


def test_the_row_of_an_anomaly_names_its_trajectories():
    fold = RecorderFold()
    anomaly = Anomaly("loss 9, usual is 0 to 1", [Carrier("p000004-1", 8.5, 50.25)])
    message = BatchTrained(1, 0, "rl", {"loss": 9.0}, {}, 0, [0.0, 0.3], 1, 1, anomaly=anomaly)
    Feed(fold).publish(message, at_s=1.0)

    (row,) = fold.rows
    assert json.loads(msgspec.json.encode(row))["anomaly"] == {
        "found": "loss 9, usual is 0 to 1",
        "carriers": [{"trajectory_id": "p000004-1", "loss": 8.5, "grad_norm": 50.25}],
    }


def test_each_held_out_set_has_rows_and_accuracies_of_its_own():
    fold = RecorderFold()
    feed = Feed(fold)
    for number, (version, dataset, accuracy) in enumerate(
        [(0, "easy", 0.5), (0, "hard", 0.1), (20, "easy", 0.9), (20, "hard", 0.2)]
    ):
        scored = EvalScored(
            f"e{number:06d}", version, {version: 3}, accuracy, 3, 0, 1.0, metrics={"pass@2": 0.7}, dataset=dataset
        )
        feed.publish(scored)

    assert [(row["set"], row["version"], row["pass@2"]) for row in fold.rows][2:] == [
        ("easy", 20, 0.7),
        ("hard", 20, 0.7),
    ]
    summary = fold.summary("demo", [])
    assert summary["accuracy_by_set"] == {"easy": {"0": 0.5, "20": 0.9}, "hard": {"0": 0.1, "20": 0.2}}
    assert summary["greedy_accuracy_before"] is None


def test_the_row_of_a_step_tells_how_often_users_agree_with_judges():
    fold = RecorderFold()
    feed = Feed(fold)
    for turn, reward, score in (("a", 1.0, 1.0), ("b", -1.0, 1.0), ("c", 1.0, 0.5), ("d", -1.0, -1.0), ("e", 0.0, 1.0)):
        feed.publish(TurnJudged(turn_id=turn, reward=reward, judge="j"))
        feed.publish(FeedbackGiven(f"f{turn}", turn, "anna", score))
    feed.publish(BatchTrained(1, 0, "rl", {}, {0: 1}, 0, [0.0, 0.3], 1, 1), at_s=1.0)

    (row,) = fold.rows
    assert (row["judge_agreement"], row["judge_rated"]) == (0.75, 4)


async def test_live_traffic_counts_in_the_rows_and_the_summary(scene: Scene):
    for turn, finish in (("a", "stop"), ("b", "length"), ("c", "failed")):
        ids = np.zeros(0 if finish == "failed" else 5, np.int32)
        ended = TurnFinished(turn, "s", finish, tokens=ids, logprobs=ids.astype(np.float32), versions=ids)
        await publish(scene.bus, ended)
    await publish(scene.bus, TurnJudged(turn_id="a", reward=1.0, judge="j"))
    await publish(scene.bus, FeedbackGiven("fa", "a", "anna", 1.0))
    await scene.steps(1, 1)

    rows, summary = await scene.record()

    (row,) = [row for row in map(json.loads, rows.splitlines()) if row["event"] == "step"]
    assert (row["judge_agreement"], row["judge_rated"]) == (1.0, 1)
    shown = dict(summary_rows(json.loads(summary) | {"trains": False}))
    assert shown["requests"] == "3 of clients, 1 failed, 0 left by their clients, 10 tokens sampled"


def test_a_summary_has_the_turns_of_a_shared_card_and_their_medians():
    fold = RecorderFold()
    feed = Feed(fold)
    for turn in (1, 2, 3):
        feed.publish(CardReturned(turn, waited_s=0.1 * turn))
        feed.publish(CardTaken("engine-1"), at_s=10.0 * turn)
        feed.publish(EngineReady("engine-1", "http://e", 0, turn, "d", 1), at_s=10.5 * turn)

    assert summary_rows(fold.summary("demo", []) | {"metrics": ""})[0] == (
        "card turns",
        "3; median 0.20 s until the learner has it, 1.00 s until an engine serves again",
    )
