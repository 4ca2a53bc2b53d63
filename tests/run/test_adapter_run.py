"""A whole run whose versions are adapters, and that goes on."""

from pathlib import Path

import pytest

from asyncrl.crash import CRASH_FOLDER, arm
from asyncrl.weights.adapters import ADAPTER_CONFIG, is_adapter
from harness.audited import assert_consistent, audited_clean, messages_on, topics_left_by
from harness.gated import closed_gate, move
from harness.runs import GATED, command, resume, up
from topics.topic import TRAINING
from topics.weights import WEIGHTS_PUBLISHED

pytestmark = pytest.mark.slow


async def test_a_run_publishes_adapters_replays_them_and_goes_on_in_its_lineage(tmp_path: Path):
    settings = ["learner.lora.rank=4", "learner.lora.publish=adapter", "learner.steps=3", "nats.keep=run"]
    async with up(tmp_path, *settings, "eval.prompts=8") as run:
        assert await run.ended() == 0, run.story
    assert_consistent(run, steps=3, warmup_steps=4)
    folders = sorted((run.root / "weights").glob("lineage*"))
    assert folders and all(is_adapter(folder) and (folder / ADAPTER_CONFIG).exists() for folder in folders)
    assert (run.root / "exported" / "model.safetensors").stat().st_size > 4 * sum(
        path.stat().st_size for path in folders[-1].iterdir()
    )
    code, output = await command(tmp_path, "up", "--resume", "short", "--set", "learner.lora.publish=merged")
    assert (code, "a resumed run keeps its settings" in output) == (1, True), output
    async with resume(tmp_path, "short", "--set", "learner.steps=5") as again:
        assert await again.ended() == 0, again.story
    assert again.steps() == [1, 2, 3, 4, 5]
    last = max((run.root / "weights").glob("lineage*"), key=lambda folder: folder.name)
    assert last.name.startswith("lineage0-v000005"), "training again gives the same adapters"
    assert is_adapter(last)
    code, output = await command(tmp_path, "audit", "short", "--deep")
    assert code == 0, output
    code, output = await command(tmp_path, "replay", "short")
    assert (code, "all 6 published versions bit-equal" in output) == (0, True), output


REWARD = """
def letters(prompt, completion, label):
    return float(len({*completion}))
"""


async def test_no_adapter_is_lost_with_a_learner_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Kill it as it writes a version, between the version in the store and its announcement, and at any place."""
    monkeypatch.setenv(CRASH_FOLDER, str(tmp_path / "points"))
    (tmp_path / "rewards.py").write_text(REWARD)  # each step has a gradient
    gate = closed_gate(tmp_path, 0)
    settings = ["learner.lora.rank=4", "learner.lora.publish=adapter", "nats.keep=run", "buffer.max_lag=1", GATED]
    settings.append("reward.function=rewards.py:letters")
    async with up(tmp_path, *settings) as run:
        for step, point in enumerate(("weights.written", "weights.renamed", ""), start=1):
            armed = arm(tmp_path / "points", point, "learner") if point else None
            if armed is None:
                await run.kill("learner")
            move(gate, step)
            await run.reaches(lambda at=step: len(run.steps()) >= at, f"step {step}")
            if armed is not None:  # the version of a step is written beside the next one
                await run.reaches(lambda armed=armed: not armed.exists(), f"{point} of step {step}")
        gate.unlink()
        assert await run.ended() == 0, run.story

    assert_consistent(run, steps=5, warmup_steps=4)
    async with topics_left_by(run) as bus:
        published = (await messages_on(bus, TRAINING)).on(WEIGHTS_PUBLISHED)
    assert [(one.lineage, one.version) for one in published] == [(0, version) for version in range(6)]
    assert len({one.adapts for one in published}) == 1 and all(one.adapts for one in published)
    assert all(row["grad_norm"] for row in run.rows() if row["stage"] == "rl")
    await audited_clean(tmp_path)
    code, output = await command(tmp_path, "replay", "short")
    assert (code, "all 6 published versions bit-equal" in output) == (0, True), output
