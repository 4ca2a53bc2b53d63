"""The Python API as its page and its notebook use it: real runs, started in the background from a running loop."""

import ast
import inspect
import io
import json
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

import asyncrl
from asyncrl.api.overrides import as_words, toml_document
from asyncrl.errors import LaunchError, WrongUsage
from asyncrl.run.directory import is_locked
from harness.pages import ROOT, blocks

SHORT = """
run = "first"
task.options.letters = 4
warmup.steps = 0
learner.trainer = "scripted"
learner.scripted_step_s = 0.2
engine.kind = "scripted"
buffer.batch_groups = 2
recorder.plot = false
"""
NOTEBOOK = ROOT / "recipes" / "notebook" / "compare-runs.ipynb"


@pytest.fixture
async def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    """A working folder whose runs end with the test."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for config in tmp_path.glob("runs/*/config.json"):
        if is_locked(config.parent):
            asyncrl.attach(str(config.parent)).stop()


async def execute(code: str, names: dict[str, Any]) -> None:
    """Execute a cell as a notebook does: in a running event loop, with `await` at the top level."""
    result = eval(compile(code, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.iscoroutine(result):
        await result


@pytest.mark.slow
@pytest.mark.real_start
async def test_the_blocks_of_the_page_run_one_after_the_other(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "my.toml").write_text(SHORT)
    names: dict[str, Any] = {}

    for block in blocks("python.md"):
        await execute(block.text, names)

    run, summary = names["run"], names["summary"]
    trained = [message.step async for message in run.topic("batch.trained")]
    assert (summary["steps"], len(names["rows"])) == (50, 50)
    assert trained == list(range(1, 51))  # all of a finished run
    assert run.status().state == "finished"
    assert run.status().wanted["rollout"] == 2
    moments = run.history()
    steps = [moment.step or 0 for moment in moments]
    assert steps == sorted(steps)
    assert max(moment.live.get("rollout", 0) for moment in moments) == 2
    assert moments[-1].state in ("running", "stopping")
    run.stop()  # of a run that is over: nothing to do
    assert capsys.readouterr().out.startswith("run first in ")


@pytest.mark.nightly  # two runs of real training
@pytest.mark.slow
@pytest.mark.real_start
async def test_the_cells_of_the_notebook_run_and_draw_both_runs(folder: Path):
    """Without a kernel: `display`, which Jupyter gives its cells, renders each figure."""
    mpl.use("Agg")
    drawn: list[bytes] = []

    class Shown:
        def __init__(self, figure: Any, **_: Any) -> None:
            self.update(figure)

        def update(self, figure: Any) -> None:
            picture = io.BytesIO()
            figure.savefig(picture, format="png")
            drawn.append(picture.getvalue())

    names: dict[str, Any] = {"display": Shown}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            await execute("".join(cell["source"]), names)

    assert len(names["rewards"]) == names["summary"]["steps"] == 30
    assert len(drawn) == 1 + 30 + 1 and all(picture.startswith(b"\x89PNG") for picture in drawn)
    assert [line.get_label() for line in names["axis"].get_lines()] == ["slow", "fast"]


def test_a_check_returns_all_problems_and_a_start_raises_them(folder: Path):
    config = {"learner": {"stps": 3}, "buffer": {"batch_groups": 0}}

    found = asyncrl.check(config)

    assert not found.ok
    assert {problem.key for problem in found.problems} == {"learner.stps", "buffer.batch_groups"}
    with pytest.raises(LaunchError) as raised:
        asyncrl.up(config)
    assert str(raised.value) == str(found)
    assert not (folder / "runs").exists()


def test_hints_and_facts_follow_the_problems_of_a_check():
    found = asyncrl.check("demo", {"learner.steps": 50})

    assert found.ok
    assert str(found).splitlines()[0] == "ok" and found.facts[-1] in str(found)


def test_settings_of_a_program_are_written_as_toml():
    settings = {
        "run": "a",
        "learner": {"lr": 1e-5, "dtype": "bfloat16"},
        "only": ["engine"],
        "eval": {"sets": {"a b": {}}},
    }

    assert tomllib.loads(toml_document(settings)) == settings
    assert as_words({"learner.steps": 50, "recorder.plot": False}) == ["learner.steps=50", "recorder.plot=false"]
    with pytest.raises(WrongUsage, match="found the value None"):
        as_words({"run": None})


def test_a_run_that_does_not_exist_is_named_with_those_that_do(folder: Path):
    with pytest.raises(asyncrl.AsyncRLError, match="no run called nothing"):
        asyncrl.attach("nothing")
