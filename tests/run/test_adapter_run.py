"""A whole run whose versions are adapters, and that goes on."""

from pathlib import Path

import pytest

from asyncrl.weights.adapters import ADAPTER_CONFIG, is_adapter
from harness.audited import assert_consistent
from harness.runs import command, resume, up

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
    code, output = await command(tmp_path, "audit", "short", "--deep")
    assert code == 0, output
    code, output = await command(tmp_path, "replay", "short")
    assert (code, "all 4 published versions bit-equal" in output) == (0, True), output

    code, output = await command(tmp_path, "up", "--resume", "short", "--set", "learner.lora.publish=merged")
    assert (code, "a run goes on with the settings it began with" in output) == (1, True), output
    async with resume(tmp_path, "short", "--set", "learner.steps=5") as again:
        assert await again.ended() == 0, again.story
    assert again.steps() == [1, 2, 3, 4, 5]
    last = max((run.root / "weights").glob("lineage*"), key=lambda folder: folder.name)
    assert last.name.startswith("lineage0-v000005"), "training again gives the same adapters"
    assert is_adapter(last)
    code, output = await command(tmp_path, "audit", "short", "--deep")
    assert code == 0, output
