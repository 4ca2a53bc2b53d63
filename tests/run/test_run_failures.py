"""Failures of runs as a user sees them: one clear message, exit code 1, the rest of the run unharmed."""

import json
import re
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.buffer.fold import BufferFold
from actors.buffer.state import Plan
from asyncrl.bus.server import EmbeddedServer
from asyncrl.cli.main import run as run_command
from asyncrl.config.settings import BufferSettings, Config, WarmupSettings
from asyncrl.ports import free_port
from asyncrl.process import living_descendants
from asyncrl.training.checkpoint import read_checkpoint
from harness.folds import NO_PAYLOAD, Feed
from harness.gated import closed_gate
from harness.models import made_model
from harness.runs import GATED, SHORT, WITHOUT_MODEL, Run, at_server, command, kill, resume, up
from harness.stage import until
from topics.actors import RunOpened
from topics.groups import GroupDropped
from topics.trajectories import TrajectoryGraded

SLOW = pytest.mark.slow

# --- before the start


def a_model(folder: Path, *, architecture: str = "Qwen3ForCausalLM", cut: int = 0) -> None:
    """A directory that looks like a model, its weights cut short by some bytes."""
    directory = folder / "a-model"
    directory.mkdir()
    config = {"architectures": [architecture], "vocab_size": 42, "max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(32 - cut)
    (directory / "model.safetensors").write_bytes(content)


def rows(folder: Path, *lines: object) -> None:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / "rows.jsonl").write_text(text)


MODEL = ["model.path=a-model", "rollout.max_new_tokens=7"]
ROWS = ["task.source=rows.jsonl", "task.options={}"]
SHORT_ROWS = [*ROWS, "model.create.context=64"]
CHAT = [{"role": "user", "content": "abc"}]


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("prepare", "settings", "message"),
    [
        (nothing, ["model.path=a-model"], "a-model is no directory; expected a Hugging Face model directory"),
        (lambda at: a_model(at, cut=5), MODEL, "model.safetensors holds no whole weights as safetensors"),
        (lambda at: a_model(at, architecture="BertForMaskedLM"), MODEL, "found BertForMaskedLM, expected a causal"),
        (nothing, ROWS, "rows.jsonl: no such file"),
        (rows, ROWS, "rows.jsonl: the file is empty"),
        (
            lambda at: rows(at, {"prompt": "^ab=", "label": "ba"}, '{"prompt": "^cd='),
            ROWS,
            "  line 2: JSON is malformed",
        ),
        (lambda at: rows(at, {"prompt": "^ab="}), ROWS, "  line 1: the reward needs a label"),
        (lambda at: rows(at, {"prompt": "^" + 60 * "a" + "=", "label": "a"}), SHORT_ROWS, "which takes 69 tokens"),
        (lambda at: rows(at, {"prompt": CHAT, "label": "a"}), ROWS, "the made model has no chat template"),
    ],
)
def test_what_is_wrong_with_the_files_of_a_config_stops_it_before_it_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prepare: Callable[[Path], None],
    settings: list[str],
    message: str,
):
    prepare(tmp_path)
    (tmp_path / "short.toml").write_text(SHORT)
    monkeypatch.chdir(tmp_path)

    assert run_command(["up", "short.toml", *(word for setting in settings for word in ("--set", setting))]) == 1

    output = capsys.readouterr()
    assert message in output.err
    first, *further = output.err.splitlines()
    assert first.startswith("--set ")
    assert all(line.startswith("  ") for line in further)
    assert output.out == ""
    assert not (tmp_path / "runs").exists()


@SLOW
async def test_a_server_that_is_not_there_ends_the_start_with_one_line(tmp_path: Path):
    url = f"nats://127.0.0.1:{free_port()}"
    async with up(tmp_path, f"nats.url={url}") as run:
        assert await run.ended() == 1, run.story

    assert one_reason(run).startswith(f"run short failed: NATS at {url} did not answer within 10 s")


async def test_a_wrong_password_ends_the_start_with_one_line(tmp_path: Path, server: EmbeddedServer):
    settings = at_server(server, tmp_path)
    (tmp_path / "password").write_text("of-another-server")
    async with up(tmp_path, *settings) as run:
        assert await run.ended() == 1, run.story

    assert "refused user 'asyncrl'" in one_reason(run)
    assert "of-another-server" not in run.error


def one_reason(run: Run) -> str:
    """The only line on stderr besides the one that says where the logs are."""
    reason, logs = run.error.splitlines()
    assert logs == f"logs: {run.root / 'logs'}"
    return reason


# --- in the middle


@SLOW
async def test_a_run_in_the_way_of_another_is_undisturbed_and_ctrl_c_ends_it_well(tmp_path: Path):
    async with up(tmp_path, *WITHOUT_MODEL, "learner.steps=5000") as run:
        await run.reaches(lambda: len(run.steps()) >= 2, "the second step")
        async with up(tmp_path) as second:
            assert await second.ended() == 1, second.story
        assert "run short is already running in" in second.error
        assert "--set run=NAME" in second.error
        assert len(second.error.splitlines()) == 1
        at = len(run.steps())
        await run.reaches(lambda: len(run.steps()) > at + 1, "two steps more")

        run.interrupt()
        assert await run.ended() == 0, run.story

    assert run.error == ""
    summary = run.summary
    assert not summary["finished"]
    assert summary["steps"] == len(run.steps())
    assert summary["exported_model"] == ""
    assert "stopped" in run.out


@SLOW
async def test_ctrl_c_before_it_trained_is_no_failure(tmp_path: Path):
    async with up(tmp_path, *WITHOUT_MODEL) as run:
        await run.reaches(lambda: run.actor("supervisor-1"), "the supervisor is there, and imports what it needs")
        run.interrupt()
        assert await run.ended() == 0, run.story
    assert run.error in ("", "stopping\n")  # the latter where nothing was shown yet
    assert f"to continue: asyncrl up --resume {run.root}" in run.out
    assert (await command(tmp_path, "runs"))[1].splitlines()[1].split()[1] in ("not", "stopped")  # not begun, if early
    async with resume(tmp_path, run.root.name) as again:
        await again.reaches(again.steps, "the first step")


@SLOW
async def test_everybody_goes_with_a_run_that_is_killed(tmp_path: Path):
    async with up(tmp_path, "learner.steps=5000") as run:
        await run.reaches(lambda: len(run.steps()) >= 1, "the first step")
        assert len(run.processes()) > 8
        kill(run.process.pid)
        await run.ended()
        await until(lambda: not run.processes(), "nobody is left")


USERS = '''
"""A reward and a rollout that go wrong for some: the first letter of the label says how."""
import asyncio
import os
import time

from asyncrl.rollout.context import single_turn

def reward(completion, label, trajectory_id):
    first = trajectory_id.endswith("-0")
    if first and label[0] == "a":
        raise ValueError("no grade for an a")
    if first and label[0] == "b":
        return float("nan")
    if first and label[0] == "c":
        time.sleep(60)
    if first and label[0] == "d":
        os._exit(7)
    return float(len(completion) % 2)

async def rollout(row, context):
    await single_turn(row, context)
    if row.label[0] == "e":
        raise LookupError("no such tool")

def never(completion):
    raise ValueError("never a grade")

def odd(completion, trajectory_id):
    return float(trajectory_id.endswith("-0"))
'''


@SLOW
async def test_what_fails_for_some_prompts_costs_only_their_trajectories(tmp_path: Path):
    (tmp_path / "users.py").write_text(USERS)
    made_model(tmp_path / "a-model")
    rows(tmp_path, *({"prompt": f"^{letter}=", "label": letter} for letter in "abcdefghijklmn"))
    functions = ["task.rollout=users.py:rollout", "reward.function=users.py:reward", "reward.time_limit_s=0.5"]
    settings = [*ROWS, *WITHOUT_MODEL, "model.path=a-model", "learner.steps=5"]
    async with up(tmp_path, *settings, *functions) as run:
        assert await run.ended() == 0, run.story

    summary = run.summary
    failed, dropped = summary["failed_trajectories_by_reason"], summary["dropped_trajectories_by_reason"]
    assert failed.keys() == {"reward", "rollout"}
    assert dropped.keys() - {"lag"} == {"reward", "failed"}  # a group of which nobody is left is dropped as failed
    assert 0 < dropped["reward"] <= failed["reward"]
    assert run.steps() == [1, 2, 3, 4, 5]
    assert "trajectories failed; last: p0" in run.out
    log = run.log("reward-1")
    for detail in ("no grade for an a", "nan", "0.5 s", "exit code 7"):
        assert detail in log
    assert "no such tool" in run.log("rollout-1")


def never_graded(folder: Path) -> list[str]:
    (folder / "users.py").write_text(USERS)
    return ["reward.function=users.py:never"]


@SLOW
async def test_what_fails_for_all_ends_the_run_with_its_reason(tmp_path: Path):
    async with up(tmp_path, *WITHOUT_MODEL, *never_graded(tmp_path)) as run:
        assert await run.ended() == 1, run.story

    assert "run short failed: buffer-1: 24 groups in a row failed and no grade arrived between them" in run.error
    assert ": reward: " in run.error
    assert "ValueError: never a grade" in run.error
    assert run.summary["failed_trajectories_by_reason"].keys() == {"reward"}
    assert run.steps() == []


@SLOW
async def test_a_warm_up_that_only_fails_ends_the_run_with_its_reason(tmp_path: Path):
    model = made_model(tmp_path / "a-model")
    failing = ["model.path=a-model", "warmup.steps=4", "warmup.rows_per_trajectory=4", "buffer.batch_groups=64"]
    async with up(tmp_path, *WITHOUT_MODEL, *failing) as run:
        await run.reaches(run.root.exists, "the settings are checked")
        forget_the_end(model)
        assert await run.ended() == 1, run.story

    assert "run short failed: buffer-1: 24 groups of the warm-up in a row failed" in run.error
    assert "names no eos_token; a supervised answer must end with one" in run.error


def forget_the_end(model: Path) -> None:
    """Take the token that ends a text out of a model directory."""
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        settings = json.loads((model / name).read_text())
        kept = {key: value for key, value in settings.items() if not key.startswith("eos_token")}
        (model / name).write_text(json.dumps(kept))


def a_buffer(failures: int, *, stage: str = "p") -> Feed:
    """A buffer without lag, of three groups in a batch of RL and two in one of the warm-up, after so many failed groups
    in a row, a second apart."""
    warmup = WarmupSettings(steps=5, batch_rows=2, rows_per_trajectory=1)
    fed = Feed(BufferFold(Plan.of(Config(buffer=BufferSettings(batch_groups=3, max_lag=0), warmup=warmup))))
    for number in range(failures):
        fed.publish(GroupDropped(f"{stage}{number:06d}", "failed", 2), at_s=10 + number)
    return fed


def test_a_buffer_gives_up_after_as_many_failed_groups_as_may_be_open_at_once():
    assert a_buffer(2).fold.should_give_up() == ""
    assert a_buffer(3).fold.should_give_up().startswith("3 groups in a row failed and no grade arrived between them")


def test_a_buffer_gives_up_a_warm_up_by_the_size_of_its_own_batches():
    assert a_buffer(1, stage="w").fold.should_give_up() == ""
    assert a_buffer(2, stage="w").fold.should_give_up().startswith("2 groups of the warm-up in a row failed")


def test_a_buffer_goes_on_while_anything_is_graded_in_whatever_order_its_logs_are_read():
    fed = a_buffer(3)
    grade = TrajectoryGraded(
        trajectory_id="p000009-0",
        prompt_id="p000009",
        member=0,
        group_size=2,
        stage="rl",
        payload=NO_PAYLOAD,
        versions=[],
        reward=1.0,
    )

    assert fed.publish(grade, at_s=9.5).fold.should_give_up()
    assert not fed.publish(grade, at_s=10.5).fold.should_give_up()


def test_a_run_that_is_opened_again_gets_new_chances():
    fed = a_buffer(3)
    fed.publish(RunOpened(steps=5, warmup_steps=0, settings={}), at_s=100)
    assert fed.fold.should_give_up() == ""

    for number in range(3):
        fed.publish(GroupDropped(f"p{100 + number:06d}", "failed", 2), at_s=110 + number)
    assert fed.fold.should_give_up()


@SLOW
async def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_batch(tmp_path: Path):
    (tmp_path / "users.py").write_text(USERS)
    async with up(tmp_path, "reward.function=users.py:odd", "learner.lr=1e30") as run:
        assert await run.ended() == 1, run.story

    (last,) = (run.root / "checkpoints").iterdir()
    learner = ("run short failed: learner-1: batch 2: ", f"the last checkpoint is intact: {last}")
    engine = "logits are not finite"  # of version 1, where an engine serves it before the learner has batch 2
    assert all(words in run.error for words in learner) or engine in run.error
    assert read_checkpoint(last).step == 0
    assert not run.summary["finished"]


@SLOW
async def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(tmp_path: Path):
    gate = closed_gate(tmp_path, 4)
    async with up(tmp_path, GATED, "learner.steps=200", "learner.checkpoint_every=10") as run:
        checkpoints = run.root / "checkpoints"
        await run.reaches(lambda: len(run.steps()) >= 2, "the second step")
        learner = run.actor("learner-1")
        assert learner is not None
        room = 600_000  # more than the weights take, less than the optimiser's state
        for rank in living_descendants(learner):  # they write
            resource.prlimit(rank, resource.RLIMIT_FSIZE, (room, room))
        gate.unlink()
        assert await run.ended() == 1, run.story

    assert re.search(r"run short failed: learner-1: batch 1\d: .*could not be written", run.error), run.error
    (last,) = checkpoints.iterdir()
    assert f"the last checkpoint is intact: {last}" in run.error
    assert read_checkpoint(last).step == 0
