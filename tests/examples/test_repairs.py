"""The rows of `asyncrl up coder`: a shell runs the programs, their check and their tests."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from asyncrl.examples.repairs import rows


@pytest.mark.parametrize("index", range(5))
def test_the_right_program_passes_and_the_given_one_does_not(index: int, tmp_path: Path):
    row: dict[str, Any] = rows(1).row(index)
    files, tests = row["metadata"]["files"], row["metadata"]["tests"]

    right, wrong, broken = (checked(tmp_path, files["check"], text) for text in (row["label"], files["f"], "x+"))

    assert right == (0, "")
    assert wrong[0] == 1
    assert wrong[1].partition(":")[0] in row["prompt"][0]["content"]
    assert broken == (2, "?\n")
    assert passed(tmp_path, tests, row["label"]) == len(tests) == 4
    assert passed(tmp_path, tests, files["f"]) < 4


def checked(folder: Path, check: str, program: str) -> tuple[int, str]:
    (folder / "check").write_text(check)
    (folder / "f").write_text(program)
    ended = subprocess.run(["sh", "check"], check=False, cwd=folder, capture_output=True, text=True)
    return ended.returncode, ended.stdout


def passed(folder: Path, tests: dict[str, list[str]], program: str) -> int:
    (folder / "f").write_text(program)
    ended = [
        subprocess.run(command, check=False, cwd=folder, capture_output=True).returncode for command in tests.values()
    ]
    return ended.count(0)
