"""Names that users import from `asyncrl`: every name is there, and none is loaded before it is used."""

import ast
import re
import subprocess
import sys

import pytest

import asyncrl
from harness.pages import PAGES, ROOT, blocks

USERS_FILES = {
    **{path.name: path.read_text(encoding="utf-8") for path in (ROOT / "asyncrl" / "examples").glob("*.py")},
    **{f"{page}:{block.file}": block.text for page in PAGES for block in blocks(page) if block.file.endswith(".py")},
}
# Beside them pages show tests of actors, and programs that look into a run from outside.
SHOWN = [name for name in USERS_FILES if ":" not in name or re.match(r"(write-|algorithms).*:(?!test_)", name)]


def test_every_public_name_is_there():
    assert {name: getattr(asyncrl, name).__name__ for name in asyncrl.__all__} == {
        name: name for name in asyncrl.__all__
    }


def test_nothing_is_loaded_before_it_is_used():
    code = (
        "import asyncrl, sys; print([name for name in sys.modules if name.startswith(('asyncrl.', 'topics', 'numpy'))])"
    )

    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("name", SHOWN)
def test_files_of_users_that_are_shown_import_nothing_of_ours_but_from_asyncrl(name: str):
    nodes = [node for node in ast.walk(ast.parse(USERS_FILES[name])) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = [node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes]

    assert {name for name in modules if name.split(".")[0] in ("asyncrl", "actors", "topics")} <= {"asyncrl"}
