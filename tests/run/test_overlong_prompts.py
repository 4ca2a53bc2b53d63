"""Rows of files whose prompts are too long are left out where a limit is set, and `asyncrl check` prints how many."""

import json
from pathlib import Path

import pytest

from asyncrl.config.load import LoadedConfig, load_config
from asyncrl.config.tasks import rows_of
from asyncrl.data.sources import open_rows
from asyncrl.environments.protocol import DataError
from asyncrl.run.preflight_rows import row_lines
from asyncrl.training.init_model import create_model
from harness.configs import the_problem

LENGTHS = (3, 900, 10, 11, 2)


@pytest.fixture
def loaded(tmp_path: Path):
    """Read a config with a limit; its model has a token for each character, and the tokenizer adds none."""
    rows = [{"prompt": "a" * length, "label": str(length)} for length in LENGTHS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    create_model(tmp_path / "model", alphabet="ab", seed=1)

    def load(limit: int) -> LoadedConfig:
        (tmp_path / "run.toml").write_text('task.source = "rows.jsonl"\nmodel.path = "model"\n')
        return load_config(str(tmp_path / "run.toml"), overrides=[f"task.max_prompt_tokens={limit}"])

    return load


def test_rows_with_longer_prompts_are_left_out_of_training_and_evaluation(loaded):
    found = loaded(10)

    for held_out in (False, True):
        source = open_rows(rows_of(found.config, found.base, held_out=held_out))
        assert source.rows_per_epoch == 3
        assert sorted(source.row(place).label for place in range(3)) == ["10", "2", "3"]


def test_check_prints_how_many_rows_are_left_out(loaded):
    words = "rows are left out, since they have prompts of more than task.max_prompt_tokens = 10 tokens"

    found = loaded(10)

    assert list(row_lines(found.config, found.base)) == [f"rows.jsonl: 3 rows; 2 {words}"]
    found = loaded(0)
    assert list(row_lines(found.config, found.base)) == []


def test_a_limit_that_leaves_no_row_is_refused(loaded):
    found = loaded(1)

    with pytest.raises(DataError, match=r"all 5 rows have prompts of more than task.max_prompt_tokens = 1 tokens"):
        open_rows(rows_of(found.config, found.base))


def test_a_limit_needs_a_model_that_is_there(tmp_path: Path):
    (tmp_path / "run.toml").write_text("task.max_prompt_tokens = 5\n")

    problem = the_problem(str(tmp_path / "run.toml"))

    assert "task.max_prompt_tokens" in str(problem) and "the run makes a model" in problem.message
