"""What `asyncrl share` is told."""

from fractions import Fraction
from pathlib import Path

import pytest

from asyncrl.cli.main import run
from asyncrl.cli.share import read_weights
from asyncrl.errors import WrongUsage

FLEET = ["--fleet", "engine=2"]


def test_weights_are_exact():
    assert read_weights(["a=0.7", "runs/b=0.3", "c=2/3"]) == {
        "a": Fraction(7, 10),
        "runs/b": Fraction(3, 10),
        "c": Fraction(2, 3),
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a=0.7", "b"], "'b': expected RUN=WEIGHT with a number above 0"),
        (["a=0.7", "b=x"], "'b=x': expected RUN=WEIGHT"),
        (["a=0.7", "b=1/0"], "'b=1/0': expected RUN=WEIGHT"),
        (["a=0.7", "b=-1"], "'b=-1': expected RUN=WEIGHT"),
        (["a=0.7", "a=0.3"], "run a is named twice"),
        (["a=1"], "one run shares with no other"),
    ],
)
def test_weights_that_mean_nothing_are_refused(words: list[str], message: str):
    with pytest.raises(WrongUsage) as refused:
        read_weights(words)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fleet", "learner=2"], "'learner' cannot be scaled"),
        (["--fleet", "engine=0"], "engine=0: expected at least one process"),
        ([*FLEET, "--window", "0"], "--window 0: expected seconds above 0"),
    ],
)
def test_a_fleet_that_cannot_be_shared_is_refused(words: list[str], message: str, capsys):
    assert run(["share", "a=0.7", "b=0.3", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_name_that_no_run_has_ends_the_command_with_the_names_that_there_are(tmp_path: Path, capsys):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").touch()

    assert run(["share", "bse=1", "tools=1", *FLEET, "--directory", str(tmp_path), "--wait", "0"]) == 1

    where = f"under {tmp_path}; runs there: base"
    error = f"nothing to share with: no run called bse {where}; no run called tools {where}\n"
    assert capsys.readouterr().err == error


def test_runs_of_which_none_is_live_or_starting_end_the_command(tmp_path: Path, capsys):
    for name in ("base", "tools"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")

    assert run(["share", "base=1", "tools=1", *FLEET, "--directory", str(tmp_path), "--wait", "3600"]) == 1
    assert "nothing to share with: run base is over; " in capsys.readouterr().err
