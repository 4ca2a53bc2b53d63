"""`asyncrl chaos`: whole runs whose processes are killed and frozen, and what it concludes from their topics."""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import SHORT, command
from stories import Story

from asyncrl.cli.chaos.report import violations_by_sense
from asyncrl.cli.chaos.witness import Samples, missing

SLOW = pytest.mark.slow
SETTINGS = {
    "learner.steps": 250,
    "learner.checkpoint_every": 5,
    "rollout.progress_tokens": 2,
    "rollout.lease_s": 1.0,
    "keepers.lease_s": 3.0,
    "eval.prompts": 8,
    "eval.every": 10,
}


async def chaos(folder: Path, *words: str) -> dict[str, Any]:
    """Run `asyncrl chaos` on the short cast; returns its report, once nothing is wrong with it."""
    (folder / "short.toml").write_text(SHORT)
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    code, said = await command(folder, "chaos", "short.toml", *settings, *words, limit_s=500)
    assert code == 0, said
    report: dict[str, Any] = json.loads((folder / "runs" / "short" / "chaos.json").read_text())
    assert report["finished"]
    assert sorted(report["rewards"], key=int) == [str(step) for step in range(1, SETTINGS["learner.steps"] + 1)]
    assert (folder / "runs" / "short" / "chaos.png").exists()
    return report


@SLOW
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_run_that_is_struck_for_forty_seconds_loses_nothing_and_trains_nothing_twice(tmp_path: Path, seed: int):
    report = await chaos(tmp_path, "--seconds", "40", "--seed", str(seed))

    assert len(report["strikes"]) >= 8, report["strikes"]
    assert report["lost"] == report["duplicated"] == report["violations"] == []


@SLOW
async def test_three_leaders_of_a_cluster_are_killed_and_training_goes_on_without_a_loss(tmp_path: Path):
    report = await chaos(tmp_path, "--cluster", "--targets", "nats:kill", "--every", "12", "--kills", "3")

    killed = report["strikes"]
    assert len(killed) == 3
    assert all(strike["works_again_s"] for strike in killed)
    assert killed[0]["step"] < killed[1]["step"] < killed[2]["step"] < SETTINGS["learner.steps"]


# --- what it concludes


def by_sense(*issued: str, again: str = "") -> tuple[list[str], list[str], list[str]]:
    """What is lost, duplicated and wrong in a run in which these trajectories were issued, one for a second attempt."""
    story = Story()
    for name in issued:
        story.issued(name)
    if again:
        story.issued(again, attempt=1)
    lost, duplicated, wrong = violations_by_sense(story.findings())
    return tuple([text.split(": found")[0] for text in texts] for texts in (lost, duplicated, wrong))


def test_a_prompt_and_a_member_that_were_left_out_are_lost():
    found = by_sense("p000000-0", "p000000-1", "p000002-0", "p000003-0")

    assert found == (["left out: p000001", "left out: p000002"], [], [])  # the last prompt may be under way


def test_an_attempt_that_was_issued_twice_is_duplicated():
    found = by_sense("w000000-0", "p000000-0", "p000000-1", "p000000-1", again="p000000-0")

    assert found == ([], ["issued twice: p000000-1"], [])


def test_a_stored_message_that_is_gone_or_another_is_named_unless_it_may_be_trimmed():
    before = {"GRADES": {1: "a", 2: "b"}, "TRAJECTORIES": {1: "x"}}
    after = {"GRADES": {1: "a", 2: "c"}}

    assert missing(before, after, payload=False) == ["GRADES 2: b was stored, now there is c"]
    assert missing(before, after, payload=True)[1:] == ["TRAJECTORIES 1: x was stored, now there is nothing"]


def test_what_a_lost_delivery_sampled_is_bounded_by_its_progress_and_by_the_result():
    samples = Samples()
    samples.stored(("p000000-0", 0), delivery=1, offset=8)
    result = {"trajectory": "p000000-0", "attempt": "0", "delivery": "3", "versions": "0:6,1:6"}
    samples.ended(result)  # delivery 1 stored 8 of 12, delivery 2 nothing more

    assert samples.tokens == 12
    assert samples.again(progress_tokens=16) == 4 + 4
    assert samples.again(progress_tokens=3) == 3 + 3
