"""Runs that go on: past a batch that cannot be trained, and beyond the steps at which they had finished."""

import re
from pathlib import Path

import pytest

from actors.prompter.fold import PrompterFold
from actors.recorder.fold import RecorderFold
from actors.supervisor.fold import SupervisorFold
from asyncrl.cli.main import run as run_command
from asyncrl.config.settings import Config, LearnerSettings
from asyncrl.state.run_state import RunState
from harness.folds import Feed
from harness.runs import WITHOUT_MODEL, command, resume, topics_left_in, up
from topics.actors import RUN_OPENED, RunOpened
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.weights import TrainingFinished

HUGE = '''
"""Rewards of a user: one of them is too large for a gradient, the fortieth."""
from pathlib import Path

calls = Path(__file__).with_name("calls")


def huge(prompt, completion, label):
    with calls.open("ab", buffering=0) as file:
        file.write(b"x")
        call = file.tell()  # of this process's own write, whatever others append beside it
    return 1e30 if call == 40 else float(completion == label)
'''


@pytest.mark.slow
async def test_a_run_goes_on_past_a_batch_that_cannot_be_trained_and_beyond_its_end(tmp_path: Path):
    (tmp_path / "users.py").write_text(HUGE)
    settings = ["reward.function=users.py:huge", "learner.advantage=none", "learner.steps=4", "nats.keep=run"]
    async with up(tmp_path, *settings) as failed:
        assert await failed.ended() == 1, failed.story
    found = re.search(r"batch (\d): .*asyncrl up --resume (\S+) --skip-batch \1", failed.error)
    assert found, failed.story
    step = found[1]
    assert Path(found[2]) == failed.root

    async with resume(tmp_path, "short", "--skip-batch", step, "--set", "buffer.batch_groups=10") as ended:
        assert await ended.ended() == 0, ended.story
    assert ended.steps() == [1, 2, 3, 4]
    assert [row["step"] for row in ended.rows() if row.get("skipped")] == [int(step)]
    weights = (ended.root / "exported" / "model.safetensors").read_bytes()

    code, output = await command(tmp_path, "up", "--resume", "short", "--set", "learner.steps=2000000000")
    assert (code, "there is room for" in output) == (1, True), output  # and the run is as it was
    larger = ["--set", "learner.steps=6", "--set", "buffer.batch_groups=12"]
    async with resume(tmp_path, "short", *larger) as longer:
        assert await longer.ended() == 0, longer.story
    assert longer.steps() == [1, 2, 3, 4, 5, 6]
    assert longer.summary["finished"]
    assert (longer.root / "exported" / "model.safetensors").read_bytes() != weights
    code, output = await command(tmp_path, "audit", "short", "--deep")
    assert code == 0, output
    assert "skipped: 32" in output
    code, output = await command(tmp_path, "replay", "short")
    assert code == 0, output
    assert "all 7 published versions bit-equal" in output


@pytest.mark.slow
async def test_a_run_goes_on_although_the_newest_records_cannot_be_read(tmp_path: Path):
    async with up(tmp_path, *WITHOUT_MODEL, "learner.steps=5000") as run:
        await run.reaches(lambda: len(run.steps()) >= 2, "the second step")
        run.interrupt()
        assert await run.ended() == 0, run.story
    trained = len(run.steps())
    async with topics_left_in(run.root) as bus:
        for topic in (BATCH_TRAINED, BATCH_PACKED, RUN_OPENED):
            await bus.store(topic.subject(bus.run), b"\xc1garbage", {})

    code, output = await command(tmp_path, "keys", "short")
    assert (code, "run short has no keys" in output) == (0, True), output
    code, output = await command(tmp_path, "up", "--resume", "short", "--skip-batch", "2")
    assert (code, "batches up to " in output) == (1, True), output
    async with resume(tmp_path, "short") as again:
        await again.reaches(lambda: len(run.steps()) > trained, "one step more")
        again.interrupt()
        assert await again.ended() == 0, again.story


def with_steps(steps: int) -> Config:
    return Config(learner=LearnerSettings(steps=steps))


@pytest.mark.parametrize(("steps", "finished"), [(6, True), (12, False)])
def test_a_run_is_over_when_it_has_the_steps_that_are_wanted_now(steps: int, finished: bool):
    config, message = with_steps(steps), TrainingFinished(6, "steps", "/there")
    opened = RunOpened(steps, 0, {"learner": {"steps": steps}})
    folds = [SupervisorFold(config), PrompterFold(config), RecorderFold(), RunState("run", steps)]
    for fold in folds:
        Feed(fold).publish(RunOpened(6, 0, {"learner": {"steps": 6}}), at_s=1)
        Feed(fold).publish(message, at_s=2).publish(opened, at_s=3)
    supervisor, prompter, recorder, state = folds

    assert supervisor.finished is finished
    assert (prompter.wanted() == []) is finished
    assert recorder.summary("run", [])["finished"] is finished
    assert state.finished is finished


def test_a_batch_is_skipped_only_of_a_run_that_goes_on(capsys: pytest.CaptureFixture[str]):
    assert run_command(["up", "demo", "--skip-batch", "3"]) == 1
    assert "give --resume RUN, too" in capsys.readouterr().err
