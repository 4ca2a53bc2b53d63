"""The gate: a run against a corridor of trusted runs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.main import run as run_command

Make = Callable[..., None]
RISING = [0.1 * step for step in range(1, 11)]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Write the metrics of a run in the folder of the test."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, values: Sequence[Any], *, field: str = "reward/mean", **others: Any) -> None:
        root = tmp_path / "runs" / name
        root.mkdir(parents=True)
        (root / "config.json").write_text("{}")
        rows = [{"event": "step", "step": 0, "stage": "warmup", field: 99.0}]
        rows += [
            {"event": "step", "step": step, "stage": "rl", field: value, **others}
            for step, value in enumerate(values, 1)
            if value != "no row"
        ]
        (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


def compare(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = run_command(["compare", "new", *words, "--metric", "reward/mean", "--json"])
    (verdict,) = json.loads(capsys.readouterr().out)
    return code, verdict


def test_diff_names_settings_and_metrics_that_differ(make: Make, capsys: pytest.CaptureFixture[str]):
    make("first", RISING, loss=0.5)
    make("second", [value + 0.2 for value in RISING[:8]], loss=0.5)
    second = Path("runs/second/config.json")
    second.write_text(json.dumps({"run": "second", "learner": {"lr": 0.5}}))

    assert run_command(["diff", "first", "second", "--all", "--window", "2", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == [{"setting": "learner.lr", "first": 1e-6, "second": 0.5}]
    first, second_value = pytest.approx(0.75), pytest.approx(0.95)
    assert found["metrics"] == [
        {"metric": "reward/mean", "step": 8, "first": first, "second": second_value},
        {"metric": "loss", "step": 8, "first": 0.5, "second": 0.5},
    ]
    assert run_command(["diff", "first", "second"]) == 0
    text = capsys.readouterr().out
    assert "learner.lr" in text and "+33.3%" in text.replace(" ", "")
    assert run_command(["diff", "first", "absent"]) == 2


@pytest.mark.parametrize("field", ["reward/mean", "reward_mean"])
def test_a_run_inside_the_corridor_passes(make: Make, capsys: pytest.CaptureFixture[str], field: str):
    make("first", RISING)
    make("second", [value + 0.1 for value in RISING])
    make("new", [value + 0.05 for value in RISING], field=field)

    code, verdict = compare(capsys, "first", "second", "--tolerance", "0")

    assert (code, verdict["windows"], verdict["outside"], verdict["fault"]) == (0, 2, 0, "")


def test_a_run_that_leaves_the_corridor_fails_with_its_worst_window(make: Make, capsys: pytest.CaptureFixture[str]):
    make("trusted", RISING)
    make("new", [*RISING[:5], *[0.1] * 5])

    code, verdict = compare(capsys, "trusted")

    assert (code, verdict["outside"], verdict["worst_step"]) == (1, 1, 10)
    assert (verdict["value"], verdict["low"], verdict["high"]) == pytest.approx((0.1, 0.72, 0.88))
    assert verdict["fault"] == "1 of 2 windows are outside of the corridor"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "no row"])
def test_a_step_without_a_finite_value_fails(make: Make, capsys: pytest.CaptureFixture[str], value: Any):
    make("trusted", RISING)
    make("new", [*RISING[:6], value, *RISING[7:]])

    code, verdict = compare(capsys, "trusted")

    assert (code, verdict["worst_step"]) == (1, 7)
    assert verdict["fault"] == "1 of 10 steps have no finite value, the first is step 7"


def test_a_run_that_ended_early_fails_and_a_longer_one_is_judged_up_to_the_end_of_the_corridor(
    make: Make, capsys: pytest.CaptureFixture[str]
):
    make("trusted", RISING)
    make("short", RISING[:4])
    make("new", [*RISING, *[99.0] * 5])

    assert compare(capsys, "trusted")[0] == 0
    code = run_command(["compare", "short", "trusted", "--metric", "reward/mean"])

    assert code == 1
    assert "6 of 10 steps have no finite value, the first is step 5" in " ".join(capsys.readouterr().out.split())


def test_trusted_runs_without_the_metric_are_named(make: Make, capsys: pytest.CaptureFixture[str]):
    make("trusted", RISING)
    make("new", RISING)

    assert run_command(["compare", "new", "trusted", "--metric", "reward/maen"]) != 0
    assert "a trusted run lacks reward/maen" in capsys.readouterr().err
    assert run_command(["compare", "new", "gone"]) == 2
    assert "gone: expected the name or the directory of a run" in capsys.readouterr().err
