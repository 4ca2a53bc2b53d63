"""Code outside the folder of a kind asks what the kind can do, and never for its name."""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


class Axis(NamedTuple):
    """A folder with a folder of each kind."""

    folder: str
    word: str = ""  # in comparisons that mean its kinds, where their names also mean other things


AXES = (Axis("asyncrl/environments"), Axis("asyncrl/judges", "judge"), Axis("asyncrl/run/placements"))


@cache
def comparisons() -> list[tuple[Path, str, set[str]]]:
    """Return each comparison in the code: its file, its text, and the constants in it."""
    return [
        (path, f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}", texts_in(node))
        for package in ("topics", "actors", "asyncrl")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
    ]


def texts_in(tree: ast.AST) -> set[str]:
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return {value for value in values if isinstance(value, str)}


@pytest.mark.parametrize("axis", AXES)
def test_no_code_compares_with_the_name_of_a_kind(axis: Axis):
    folders = [path.parent for path in (ROOT / axis.folder).glob("*/kind.py")]
    names = {folder.name.replace("_", "-") for folder in folders}
    wrong = [
        text
        for path, text, constants in comparisons()
        if constants & names and axis.word in text
        if not any(path.is_relative_to(folder) for folder in folders)
    ]

    assert names
    assert not wrong, "\n".join(wrong)
