"""`asyncrl chaos CONFIG`: whole runs whose processes are killed and frozen, and what it concludes from their topics."""

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.cli.main import run
from asyncrl.crash import POINTS
from benchmarks.chaos.report import violations_by_sense
from benchmarks.chaos.targets import all_targets, each_point
from benchmarks.chaos.witness import Samples, missing
from harness.audited import messages_on
from harness.runs import PACED, SHORT, WITHOUT_MODEL, command
from harness.scripted import FLAT, SCRIPTED
from harness.stage import until
from harness.stories import Story
from topics.batches import BATCH_TRAINED
from topics.topic import TRAINING

pytestmark = pytest.mark.nightly
SLOW = pytest.mark.slow
SETTINGS = {
    "learner.checkpoint_every": 5,
    "rollout.progress_tokens": 2,
    "workers.lease_s": 1.0,
    "supervision.silence_s": 3.0,
    "eval.prompts": 8,
    "eval.every": 10,
}


async def chaos(folder: Path, steps: int, settings: Sequence[str], *words: str) -> dict[str, Any]:
    """Run `asyncrl chaos` on the short config; returns its report, once nothing is wrong with it.

    Args:
        settings: `KEY=VALUE`; they must pace the run, whose steps are to last until all is injected.
    """
    (folder / "short.toml").write_text(SHORT)
    own = [*(f"{key}={value}" for key, value in SETTINGS.items()), f"learner.steps={steps}", *settings]
    words = (*(word for setting in own for word in ("--set", setting)), *words)
    patient = ("--stall", "200")  # a rank that is frozen while it starts is given up after 120 s
    code, output = await command(folder, "chaos", "short.toml", *words, *patient, limit_s=1200)
    assert code == 0, output
    report: dict[str, Any] = json.loads((folder / "runs" / "short" / "chaos.json").read_text())
    assert report["finished"]
    assert sorted(report["rewards"], key=int) == [str(step) for step in range(1, steps + 1)]
    assert (folder / "runs" / "short" / "chaos.png").exists()
    return report


@SLOW
async def test_injections_lose_nothing_and_train_nothing_twice(tmp_path: Path):
    paced = (PACED, "rollout.slots=16")  # a step takes two seconds
    report = await chaos(tmp_path, 40, paced, "--seconds", "200", "--kills", "16", "--seed", "1")

    assert len(report["injections"]) == 16, report["injections"]
    assert report["lost"] == report["duplicated"] == report["violations"] == []


@SLOW
async def test_three_leaders_of_a_cluster_are_killed_and_training_goes_on_without_a_loss(tmp_path: Path):
    leaders = ("--cluster", "--targets", "nats:kill", "--every", "12", "--kills", "3")
    paced, steps = (*WITHOUT_MODEL, "learner.scripted_step_s=1.5"), 45
    report = await chaos(tmp_path, steps, paced, *leaders, "--after-recovery")

    killed = report["injections"]
    assert len(killed) == 3
    assert all(injection["works_again_s"] for injection in killed)
    assert 0 < killed[0]["step"] < killed[1]["step"] < killed[2]["step"] < steps


# --- runs that stand still

SLEEPS = """
import time

def reward(completion):
    time.sleep(600)
    return 0.0
"""


async def stalled(
    folder: Path, words: list[str], freeze: Callable[[Path], Awaitable[None]] | None = None
) -> dict[str, Any]:
    """Run `asyncrl chaos` on a run that will stand still; returns its report, once all processes are gone.

    Args:
        freeze: stops processes of the run, once they are there.
    """
    folder.mkdir()
    (folder / "short.toml").write_text(SCRIPTED)
    (folder / "sleeps.py").write_text(SLEEPS)
    (folder / "flat.py").write_text(FLAT)
    rows = [{"prompt": "^ab=", "label": "flat" if number < 4 else "ba"} for number in range(48)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [word for setting in words for word in ("--set", setting)]
    injections = ("--targets", "recorder:kill", "--every", "2", "--stall", "60")  # four runs start at once
    running = asyncio.create_task(command(folder, "chaos", "short.toml", *settings, *injections, limit_s=1200))
    if freeze is not None:
        freezing = asyncio.create_task(freeze(folder))
        await asyncio.wait({running, freezing}, return_when=asyncio.FIRST_COMPLETED)
        assert freezing.done(), f"it ended before: {running.result()}"
        freezing.result()
    code, output = await running
    assert code == 1, output
    assert {line for line in processes(folder).values() if "asyncrl" in line} == set()
    report: dict[str, Any] = json.loads((folder / "runs" / "short" / "chaos.json").read_text())
    assert f"verdict: stalled {'before the first step' if report['stall']['step'] is None else 'at step'}" in output
    assert re.search(r"no step, result or grade since \d\d:\d\d:\d\d UTC \(\d+ s\): ", output), output
    assert report["lost"] == report["duplicated"] == report["violations"] == [], output
    return report


def processes(folder: Path) -> dict[int, str]:
    """Command lines of the living processes that work in a folder."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended in this moment
            if (process / "cwd").readlink() == folder:
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def freeze(folder: Path, *words: str) -> bool:
    """Stop the processes whose command lines hold these words; False, and nothing done, where one is not there."""
    living = processes(folder)
    chosen = [next((pid for pid, line in living.items() if word in line), None) for word in words]
    if None in chosen:
        return False
    for pid in chosen:
        os.kill(pid, signal.SIGSTOP)
    return True


async def before_training(folder: Path) -> None:
    """Stop `asyncrl up` once there is a learner."""
    await until(lambda: any("main learner" in line for line in processes(folder).values()), "its learner", 200)
    assert freeze(folder, "main up")


async def in_warmup(folder: Path) -> None:
    """Stop a worker and all that could replace it once a batch was trained.

    The recorder's file does not tell: it is killed from that batch on, and on a loaded machine before it wrote any.
    """
    root = folder / "runs" / "short"

    async def trained() -> bool:
        with contextlib.suppress(BusError):  # its server or its topics are not there yet
            bus = await Bus.connect(BusAddress.read(root / "nats.json"), "short", name="test")
            try:
                return bool((await messages_on(bus, TRAINING)).on(BATCH_TRAINED))
            finally:
                await bus.close()
        return False

    await until((root / "nats.json").exists, "the address of its server", 200)
    await until(trained, "its first batch", 200)
    await until(lambda: freeze(folder, "main up", "main supervisor", "main rollout"), "its processes", 200)


@SLOW
async def test_a_run_that_stands_still_ends_with_a_verdict_wherever_it_stands(tmp_path: Path):
    few = ["task.source=rows.jsonl", "task.epochs=1", "task.options={}", "learner.steps=6"]
    roomy = "nats.stream_max_mb=64"  # whose streams are never nearly full, which is a finding, too
    # No group becomes too old: five batches come of the rows, and take longer than it is until the first injection.
    few += [roomy, "buffer.max_lag=8", "learner.keep_versions=10", "learner.scripted_step_s=2"]
    first, data, warm, last = await asyncio.gather(
        stalled(tmp_path / "a", ["reward.function=sleeps.py:reward", "reward.time_limit_s=500", "warmup.steps=0"]),
        stalled(
            tmp_path / "b",
            [*few, "reward.function=flat.py:reward", "learner.filters=['zero_variance']", "warmup.steps=0"],
        ),
        stalled(
            tmp_path / "c",
            ["nats.stream_max_mb=0", "warmup.steps=9000", "learner.scripted_step_s=0.1"],
            in_warmup,
        ),
        stalled(tmp_path / "d", [roomy, "warmup.steps=0"], before_training),
    )
    assert first["stall"]["step"] is None and first["injections"] == []
    assert any("reward hanging: reward-1: grades p0000" in found for found in first["stall"]["findings"])
    assert data["stall"]["step"] == 5 and data["injections"]
    assert [found.split(":")[0] for found in data["stall"]["findings"]] == ["end of data"]
    assert warm["stall"]["step"] < 0
    assert "rollout-1" in warm["stall"]["stopped"] and "up" in warm["stall"]["stopped"]
    assert any(found.startswith("actor silent: rollout-1: ") for found in warm["stall"]["findings"])
    assert any(text.startswith("recorder: kill at ") for text in warm["unrecovered"])
    assert last["stall"]["step"] == 60 and last["stall"]["findings"] == [] and last["stall"]["stopped"] == ["up"]


def test_a_limit_that_no_run_can_keep_is_refused(capsys: pytest.CaptureFixture[str]):
    assert run(["chaos", "--stall", "0"]) != 0
    assert capsys.readouterr().err == "--stall 0: expected more than 0 seconds\n"


# --- what it concludes


def by_sense(*issued: str, again: str = "") -> tuple[list[str], list[str], list[str]]:
    """Count what is lost, duplicated and wrong where these trajectories were issued, one for a second attempt."""
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
    before = {"GRADES": {1: "a", 2: "b"}, "TRAJECTORIES": {1: "x"}, "SECRETS": {1: "purged"}}
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


# --- which points it visits


def test_each_point_is_visited_as_often_as_asked_and_its_roles_take_turns():
    found = list(each_point(all_targets(), 3, 7))

    visited = [
        point for point in POINTS if not point.startswith("card.")
    ]  # only of runs whose GPUs are shared by turns
    assert sorted(target.kind for target in found) == sorted(visited * 3)
    assert {target.role for target in found if target.kind == "work.published"} == {"rollout", "reward"}
