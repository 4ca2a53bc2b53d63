"""Every place where a process can die between two effects is in the table, in the code and on the page."""

import re
from pathlib import Path

import pytest

from asyncrl.crash import POINTS, arm

ROOT = Path(__file__).parent.parent
CALL = re.compile(r'crash_point\("([\w.]+)"\)')


def calls() -> set[str]:
    files = [file for folder in ("actors", "asyncrl") for file in (ROOT / folder).rglob("*.py")]
    return {name for file in files for name in CALL.findall(file.read_text())}


def table() -> list[list[str]]:
    """The points in docs/internals/delivery.md: name, done and not done."""
    page = (ROOT / "docs" / "internals" / "delivery.md").read_text()
    _, rest = page.split("| point | has happened, has not |\n|---|---|\n")
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rest.split("\n\n")[0].splitlines()]


def test_every_point_is_passed_somewhere_and_every_call_names_a_point():
    assert calls() == set(POINTS)


def test_the_page_names_for_every_point_what_has_happened():
    rows = table()

    assert [name for name, *_ in rows] == list(POINTS)
    assert all(cell for row in rows for cell in row)


def test_a_point_cannot_be_armed_for_a_role_that_never_passes_it(tmp_path: Path):
    with pytest.raises(ValueError, match=r"learner\.stepped for rollout: passed by learner"):
        arm(tmp_path, "learner.stepped", "rollout")
    with pytest.raises(ValueError, match=r"nowhere for rollout: expected one of publish\.before"):
        arm(tmp_path, "nowhere", "rollout")
