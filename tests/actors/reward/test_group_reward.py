"""One call grades a group: on a real server, with worker processes that are killed."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from actors.reward.actor import main
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish, publish_if_latest
from asyncrl.crash import CRASH_FOLDER, arm
from harness.audited import messages_on
from harness.results import generated, is_done
from harness.stage import Stage, until
from topics.groups import GROUP_GRADED, GroupCompleted, GroupGraded, MemberGrade
from topics.topic import GRADES, TRAJECTORIES
from topics.trajectories import (
    TRAJECTORY_FAILED,
    TRAJECTORY_GRADED,
    TRAJECTORY_SUBMITTED,
    Outcome,
    VersionCount,
)

NEVER_THE_SAME = """
import random

def reward(completion, label, trajectory_id):
    best = max(map(len, completion))
    assert len(label) == len(trajectory_id) == len(completion)
    return [{"reward": len(text) / best, "drawn": random.random()} for text in completion]
"""
FAULTS = """
def raises(completion):
    raise ValueError("no judge")

def too_few(completion):
    return [1.0]

def one_bad(completion):
    return [1.0, float("nan"), 0.5]
"""
JUDGES = """
import time

def plain(first, second, prompt, label):
    return (len(first), len(second))

async def judge(first, second, prompt, label):
    return 0.5 if len(first) == len(second) else float(len(first) > len(second))

def hangs(first, second, prompt, label):
    time.sleep(600)
"""
PUNISHED = {"penalty": 2.0, "longest_tokens": 100, "interval_tokens": 40}


async def work(bus: Bus, play: Stage, role: str) -> None:
    """Have a worker inside this process do all work of its queue."""
    context = play.context(role, bus)
    running = asyncio.create_task(main(context))
    await until(lambda: is_done(bus, role), "all is done")
    context.stop.set()
    await asyncio.wait_for(running, 300)


async def submit(bus: Bus, play: Stage) -> GroupCompleted:
    """Three results, as the single reward worker hands them on, and the buffer asks for their grades."""
    for member in range(3):
        message = msgspec.structs.replace(
            generated(1),
            trajectory_id=f"p000001-{member}",
            member=member,
            group_size=3,
            completion="x" * (member + 1),
            versions=[VersionCount(0, 40 + 20 * member)],
            outcome=Outcome(None, {"own": float(member)}),
        )
        await publish(bus, message)
    await work(bus, play, "reward")
    said = await messages_on(bus, GRADES)
    assert said.on(TRAJECTORY_GRADED) == []
    members = sorted(said.on(TRAJECTORY_SUBMITTED), key=lambda one: one.member)
    completed = GroupCompleted("p000001", members)
    await publish(bus, completed)
    return completed


@pytest.fixture
def crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CRASH_FOLDER, str(tmp_path / "points"))
    return tmp_path / "points"


async def test_a_worker_killed_behind_its_grades_leaves_the_same_ones_to_the_next(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path, crashes: Path
):
    (tmp_path / "group.py").write_text(NEVER_THE_SAME)
    function = f"{tmp_path / 'group.py'}:reward"
    play = stage(reward={"function": function, "scope": "group", "overlong": PUNISHED})
    await submit(bus, play)
    arm(crashes, "work.published", "groupreward")
    first = await play.start("groupreward", 1)
    await until(lambda: first.returncode is not None, "the first worker ends behind the grades")

    await play.start("groupreward", 2)
    await until(lambda: is_done(bus, "groupreward"), "the second one acknowledges")

    said = await messages_on(bus, GRADES)
    [scores] = said.on(GROUP_GRADED)
    grades = said.on(TRAJECTORY_GRADED)
    assert [(one.member, one.delivery) for one in grades] == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]
    for one in grades:
        assert one.score == scores.grades[one.member].reward == (one.member + 1) / 3
        assert one.metrics["drawn"] == scores.grades[one.member].metrics["drawn"]
        punished = -1.0 if one.member == 2 else 0.0  # 2 * (60 - 80) / 40 of its 80 tokens, the others have 60 at most
        assert (one.metrics["own"], one.metrics["overlong"]) == (one.member, punished)
        assert one.reward == one.score + punished


async def test_scores_that_a_killed_worker_stored_are_the_grades_of_the_group(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    """Die between the stored scores and the grades: no function is called again."""
    (tmp_path / "group.py").write_text(FAULTS)
    play = stage(reward={"function": f"{tmp_path / 'group.py'}:raises", "scope": "group"})
    await submit(bus, play)
    grades = [MemberGrade(0.25, {"drawn": 1.0}), MemberGrade(fault="no text"), MemberGrade(0.75)]
    await publish_if_latest(bus, GroupGraded("p000001", grades), 0)

    await work(bus, play, "groupreward")

    said = await messages_on(bus, GRADES)
    assert [(one.member, one.reward) for one in said.on(TRAJECTORY_GRADED)] == [(0, 0.25), (2, 0.75)]
    assert said.on(TRAJECTORY_GRADED)[0].metrics == {"own": 0.0, "drawn": 1.0}
    assert [(one.member, one.detail) for one in said.on(TRAJECTORY_FAILED)] == [(1, "no text")]
    assert len(said.on(GROUP_GRADED)) == 1


@pytest.mark.parametrize(
    ("function", "failed", "detail"),
    [
        ("raises", {0, 1, 2}, "ValueError: no judge"),
        ("too_few", {0, 1, 2}, "returned 1 scores for the 3 members of a group"),
        ("one_bad", {1}, "the function returned nan"),
    ],
)
async def test_members_without_a_score_fail(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path, function: str, failed: set[int], detail: str
):
    (tmp_path / "group.py").write_text(FAULTS)
    play = stage(reward={"function": f"{tmp_path / 'group.py'}:{function}", "scope": "group"})
    await submit(bus, play)

    await work(bus, play, "groupreward")

    said = await messages_on(bus, GRADES)
    failures = said.on(TRAJECTORY_FAILED)
    assert {one.member for one in failures} == failed
    assert {one.reason for one in failures} == {"reward"}
    assert all(detail in one.detail for one in failures)
    assert [one.tokens for one in failures] == [40 + 20 * one.member for one in failures]
    assert {one.member for one in said.on(TRAJECTORY_GRADED)} == {0, 1, 2} - failed


async def test_a_group_whose_tokens_are_gone_fails(bus: Bus, stage: Callable[..., Stage], tmp_path: Path):
    """As where it ended by its deadline, and what it sampled was trimmed."""
    (tmp_path / "group.py").write_text(NEVER_THE_SAME)
    play = stage(reward={"function": f"{tmp_path / 'group.py'}:reward", "scope": "group"})
    await submit(bus, play)
    await bus.api(f"STREAM.PURGE.{TRAJECTORIES.full_name(bus.run)}")

    await work(bus, play, "groupreward")

    failures = (await messages_on(bus, GRADES)).on(TRAJECTORY_FAILED)
    assert {one.member for one in failures} == {0, 1, 2}
    assert "are gone" in failures[0].detail


async def ranked(bus: Bus, play: Stage, folder: Path) -> dict[int, float | str]:
    """Grades, or faults, of three results of 1, 2 and 3 characters, by member."""
    (folder / "judges.py").write_text(JUDGES)
    await submit(bus, play)
    await work(bus, play, "groupreward")
    said = await messages_on(bus, GRADES)
    assert len(said.on(GROUP_GRADED)) == 1
    grades = {one.member: one.reward for one in said.on(TRAJECTORY_GRADED)}
    return grades | {one.member: one.detail for one in said.on(TRAJECTORY_FAILED)}


def tournament(folder: Path, name: str, judge: str, **settings: float) -> dict[str, object]:
    return {"function": f"{folder / 'judges.py'}:{judge}", "scope": "group", "tournament": name, **settings}


@pytest.mark.parametrize("judge", ["plain", "judge"])
async def test_a_tournament_ranks_a_group_by_comparisons_of_two(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path, judge: str
):
    play = stage(reward=tournament(tmp_path, "round_robin", judge))

    assert await ranked(bus, play, tmp_path) == {0: 0.0, 1: 0.5, 2: 1.0}


async def test_a_tournament_past_its_own_limit_fails_its_group(bus: Bus, stage: Callable[..., Stage], tmp_path: Path):
    play = stage(reward=tournament(tmp_path, "double_elimination", "hangs", time_limit_s=300.0, tournament_limit_s=0.5))

    found = await ranked(bus, play, tmp_path)

    assert found.keys() == {0, 1, 2}
    assert all("no answer within 0.5 s" in str(detail) for detail in found.values())
