"""The names of metrics, and rows of older versions."""

from pathlib import Path

import pytest

from asyncrl.api.rows import metric_rows
from asyncrl.sinks.figures import step_figure


@pytest.mark.parametrize("stored", ["reward_mean", "reward/mean"])
def test_a_row_is_found_by_the_name_and_by_the_older_name(tmp_path: Path, stored: str):
    (tmp_path / "metrics.jsonl").write_text(f'{{"event":"step","step":1,"{stored}":0.5}}\n')

    [row] = metric_rows(tmp_path / "metrics.jsonl", "step")

    assert row == {"event": "step", "step": 1, "reward/mean": 0.5}
    assert row["reward_mean"] == row["reward/mean"] == 0.5
    with pytest.raises(KeyError, match="reward_max"):
        row["reward_max"]


def test_a_figure_of_a_step_has_one_name():
    names = ["reward_mean", "reward/mean", "loss", "train/loss", "reward/format"]

    assert [step_figure(name) for name in names] == [
        "reward/mean",
        "reward/mean",
        "train/loss",
        "train/loss",
        "reward/format",
    ]
