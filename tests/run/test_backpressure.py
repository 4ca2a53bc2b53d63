"""A slow learner, a slow engine, a full stream: memory, streams and lag stay within their bounds, and nothing spins."""

import asyncio
import itertools
import os
from pathlib import Path

import msgspec
import pytest

from actors.learner.fold import LearnerFold
from asyncrl.bus.connection import Bus
from asyncrl.config.settings import Config
from asyncrl.crash import CRASH_FOLDER, arm
from harness.audited import assert_within_lag, messages_on, topics_left_by
from harness.folds import Feed
from harness.prompter_feed import feed, issue
from harness.runs import address_of, command, kill, resume, two_steps_more, up
from harness.scripted import SCRIPTED, STREAM_MB
from harness.stage import until
from topics.streams import (
    ADMISSION_PAUSED,
    ADMISSION_RESUMED,
    STREAM_TRIMMED,
    AdmissionPaused,
    AdmissionResumed,
    CheckpointRequested,
)
from topics.topic import FLEET
from topics.trajectories import TRAJECTORY_PROGRESSED
from topics.weights import CheckpointSaved

SLOW = pytest.mark.slow


# --- what is decided


def test_a_paused_admission_issues_no_more_than_the_next_batch_takes():
    fed = feed(buffer={"batch_groups": 2, "max_lag": 3})
    assert len(issue(fed)) == 8 * 2
    fed.publish(AdmissionPaused("full"))
    for number in range(6):
        fed.dropped(f"p{number:06d}")
    assert issue(fed) == []

    fed.dropped("p000006")
    assert issue(fed) == ["p000008-0", "p000008-1"]
    fed.publish(AdmissionResumed("room"))
    assert len(issue(fed)) == 6 * 2


def test_a_paused_admission_finishes_what_it_had_begun():
    fed = feed()
    issue(fed, 3)
    fed.publish(AdmissionPaused("full"))
    fed.too_old("p000000-1")

    assert issue(fed) == ["p000000-1", "p000001-1"]


def test_a_checkpoint_that_was_asked_for_is_due_until_a_later_one_is_saved():
    fed = Feed(LearnerFold(Config()))
    assert not fed.fold.wants_checkpoint(3)
    fed.publish(CheckpointRequested(0, "full"))
    assert not fed.fold.wants_checkpoint(0)  # that would be the one there is
    assert fed.fold.wants_checkpoint(3)

    fed.publish(CheckpointSaved(0, 3, "00", "there", 1))
    assert not fed.fold.wants_checkpoint(4)
    fed.publish(CheckpointRequested(3, "full"))
    assert fed.fold.wants_checkpoint(4)


def test_a_checkpoint_whose_turn_was_missed_is_due_at_the_next_step():
    fed = Feed(LearnerFold(msgspec.convert({"warmup": {"steps": 4}}, Config)))
    assert [step for step in range(-4, 3) if fed.fold.wants_checkpoint(step, every=4)] == [0, 1, 2]
    fed.publish(CheckpointSaved(0, 5, "00", "there", 1))
    assert [step for step in range(5, 13) if fed.fold.wants_checkpoint(step, every=4)] == [8, 9, 10, 11, 12]


# --- whole runs


class Sizes:
    """CPU seconds and memory of a run's processes."""

    def __init__(self, run, roles):
        self._pids = {role: run.actor(f"{role}-1") for role in roles}

    def resident_mb(self):
        page = os.sysconf("SC_PAGESIZE")
        return {
            role: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page / 1e6
            for role, pid in self._pids.items()
        }

    def cpu_s(self):
        ticks = os.sysconf("SC_CLK_TCK")
        stats = {role: Path(f"/proc/{pid}/stat").read_text().split(") ")[1].split() for role, pid in self._pids.items()}
        return {role: (int(stat[11]) + int(stat[12])) / ticks for role, stat in stats.items()}


async def fleet_log(run):
    """Return what the supervisor of a run that is over has published."""
    async with topics_left_by(run) as bus:
        return await messages_on(bus, FLEET)


async def assert_clean(tmp_path):
    code, output = await command(tmp_path, "audit", "short", "--deep")
    assert code == 0, output
    assert "clean" in output


@SLOW
async def test_a_slow_learner_costs_no_memory_no_room_and_no_lag(tmp_path: Path):
    async with up(tmp_path, "learner.scripted_step_s=0.1", "learner.steps=1000", config=SCRIPTED) as run:
        await run.reaches(lambda: len(run.steps()) > 15, "some steps")
        sizes = Sizes(run, ("prompter", "rollout", "reward", "buffer"))
        early = sizes.resident_mb()
        await run.reaches(lambda: len(run.steps()) > 35, "more than the stream takes")
        code, output = await command(tmp_path, "status", "short", "--json")
        assert code == 0, output
        status = msgspec.json.decode(output)
        await run.reaches(lambda: len(run.steps()) > 60, "the stream's size once more")
        late = sizes.resident_mb()
        run.interrupt()
        assert await run.ended() == 0, run.story

    assert status["trims"] > 0
    assert status["trimmed_bytes"] > STREAM_MB * 1e6 / 4
    assert status["streams"]["TRAJECTORIES"]["max_bytes"] == STREAM_MB * 1_000_000
    assert all(late[role] < 1.3 * early[role] + 10 for role in early), (early, late)
    assert_within_lag(run, max_lag=2)
    output = await fleet_log(run)
    trims = output.on(STREAM_TRIMMED)
    assert len(trims) >= 3
    assert sum(trim.bytes for trim in trims) > STREAM_MB * 1e6
    assert len(list((run.root / "checkpoints").iterdir())) == 2
    assert len(list((run.root / "weights").iterdir())) <= 6
    await assert_clean(tmp_path)


@SLOW
async def test_a_slow_engine_lets_everybody_rest(tmp_path: Path):
    slow = ("engine.scripted_mean_s=1.0", "engine.scripted_sigma=0.0", "rollout.slots=32", "learner.steps=1000")
    async with up(tmp_path, *slow, config=SCRIPTED) as run:
        await run.reaches(lambda: len(run.steps()) > 2, "some steps")
        sizes = Sizes(run, ("prompter", "rollout", "reward", "buffer", "learner", "supervisor", "recorder"))
        before, at = sizes.cpu_s(), asyncio.get_running_loop().time()
        steps = len(run.steps())
        await run.reaches(lambda: len(run.steps()) > steps + 4, "some more")
        wall_s = asyncio.get_running_loop().time() - at
        busy = {role: (after - before[role]) / wall_s for role, after in sizes.cpu_s().items()}
        run.interrupt()
        assert await run.ended() == 0, run.story

    assert all(share < 0.3 for share in busy.values()), busy


@SLOW
async def test_a_stream_that_somebody_fills_stops_nothing_for_ever(tmp_path: Path):
    async with up(tmp_path, "learner.scripted_step_s=0.05", "learner.steps=1000", config=SCRIPTED) as run:
        await run.reaches(lambda: len(run.steps()) > 10, "some steps")
        bus = await Bus.connect(address_of(run), "short")
        numbers = itertools.count()

        async def paused() -> bool:
            """Fill the stream, and return whether that was noticed: a trim may have made room before."""
            refused = 0
            while refused <= 20:
                name = f"p9{next(numbers):05d}-0"
                body = {"trajectory": name, "attempt": "0", "delivery": "1", "offset": "0"}
                reply = await bus.request(TRAJECTORY_PROGRESSED.ingest("short", name), b"x" * 20_000, body)
                refused += b"maximum bytes exceeded" in reply.data
            return bool((await messages_on(bus, FLEET)).on(ADMISSION_PAUSED))

        async def resumed() -> bool:
            return bool((await messages_on(bus, FLEET)).on(ADMISSION_RESUMED))

        await until(paused, "the stream is found full")
        await until(resumed, "there is room again")
        await bus.close()
        await two_steps_more(run, "it trains on")
        run.interrupt()
        assert await run.ended() == 0, run.story

    output = await fleet_log(run)
    pauses, resumptions = len(output.on(ADMISSION_PAUSED)), len(output.on(ADMISSION_RESUMED))
    assert pauses - 1 <= resumptions <= pauses, "the run may end within a pause, but not the first"
    await assert_clean(tmp_path)


@SLOW
@pytest.mark.nightly
async def test_a_run_that_is_killed_while_it_trims_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The supervisor dies once at each point between two effects of a trim, then everybody dies."""
    monkeypatch.setenv(CRASH_FOLDER, str(tmp_path / "crash"))
    points = [
        arm(tmp_path / "crash", name, "supervisor")
        for name in ("trim.purged", "prune.inside", "trim.blobs_purged", "trim.announced")
    ]
    async with up(tmp_path, "learner.steps=120", "learner.scripted_step_s=0.05", config=SCRIPTED) as run:
        await run.reaches(lambda: not any(point.exists() for point in points), "a death at each point", 400)
        at = len(run.steps())
        await run.reaches(lambda: len(run.steps()) > at + 5, "some steps of the fifth supervisor")
        kill(run.process.pid)
    async with resume(tmp_path, "short") as run:
        assert await run.ended() == 0, run.story

    assert run.steps() == list(range(1, 121))
    assert_within_lag(run, max_lag=2)
    assert not [path.name for path in (run.root / "checkpoints").iterdir() if path.name.startswith(".")]
    await assert_clean(tmp_path)
