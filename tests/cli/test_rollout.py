"""`asyncrl rollout`: completions of a model as it is, without a learner."""

from pathlib import Path

import pyarrow.parquet
import pytest

from asyncrl.cli.rollout import mode_of
from harness.runs import SHORT, command


@pytest.mark.slow
async def test_completions_are_written_with_rewards_and_log_probs_and_the_audit_is_clean(tmp_path: Path):
    (tmp_path / "run.toml").write_text(SHORT)

    code, output = await command(tmp_path, "rollout", "run.toml", "--prompts", "6", "-o", "rows.parquet")

    assert code == 0, output
    rows = pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert (len(rows), len({row["prompt_id"] for row in rows})) == (24, 6)
    for row in rows:
        [tokens], [mask], [logprobs], [versions] = (row[name] for name in ("tokens", "mask", "logprobs", "versions"))
        assert len(tokens) == len(mask) == len(logprobs) == len(versions)
        assert {version for version, sampled in zip(versions, mask, strict=True) if sampled} == {0}
        assert all(value < 0 for value, sampled in zip(logprobs, mask, strict=True) if sampled)
        assert row["prompt"].startswith("^") and row["label"] and row["reward"] is not None
    code, output = await command(tmp_path, "audit", "short")
    assert code == 0, output


@pytest.mark.parametrize(("prompts", "batch", "steps"), [(6, 6, 1), (100, 50, 2), (128, 64, 2), (131, 1, 131)])
def test_batches_are_as_large_as_the_number_of_prompts_allows(prompts: int, batch: int, steps: int):
    assert {f"buffer.batch_groups={batch}", f"learner.steps={steps}"} <= set(mode_of(prompts))
