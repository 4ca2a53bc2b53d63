"""Code outside the module of a kind asks what the kind can do, and never for its name."""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from asyncrl.config.harness_settings import KINDS as HARNESSES
from asyncrl.config.learner_settings import TRAINERS
from asyncrl.config.live_settings import JUDGES
from asyncrl.config.process_settings import PLACEMENTS
from asyncrl.config.sandbox_settings import SANDBOXES
from asyncrl.config.tool_settings import KINDS as TOOLS
from asyncrl.config.weights_settings import STORES
from asyncrl.data.procedural import RULES
from asyncrl.environment_names import KINDS as ENVIRONMENTS
from asyncrl.rewards.kinds import BUILT_IN

ROOT = Path(__file__).parent.parent


class Axis(NamedTuple):
    """Kinds with a module or a package of each."""

    package: str
    names: tuple[str, ...]
    word: str = ""  # in comparisons that mean these kinds, where their names also mean other things


AXES = (
    Axis("asyncrl/data", tuple(RULES), "source"),
    Axis("asyncrl/environments", ENVIRONMENTS, "environment"),
    Axis("asyncrl/harnesses", tuple(HARNESSES), "harness"),
    Axis("asyncrl/judges", JUDGES, "judge"),
    Axis("asyncrl/rewards", tuple(BUILT_IN), "reward"),
    Axis("asyncrl/run/placements", PLACEMENTS),
    Axis("asyncrl/sandboxes", SANDBOXES, "sandbox"),
    Axis("asyncrl/tools", tuple(TOOLS), "tool"),
    Axis("asyncrl/training", TRAINERS, "trainer"),
    Axis("asyncrl/weights", STORES, "store"),
)


NAMES = {name for axis in AXES for name in axis.names}


@cache
def comparisons() -> list[tuple[Path, str, set[str]]]:
    """Return each comparison with the name of a kind: its file, its own text, and the texts in it."""
    return [
        (path, f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}", texts)
        for package in ("topics", "actors", "asyncrl")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare) and not NAMES.isdisjoint(texts := texts_in(node))
    ]


def texts_in(tree: ast.AST) -> set[str]:
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return {value for value in values if isinstance(value, str)}


@pytest.mark.parametrize("axis", AXES)
def test_no_code_compares_with_the_name_of_a_kind(axis: Axis):
    names = set(axis.names)
    wrong = [
        text
        for path, text, constants in comparisons()
        if constants & names and axis.word in text and not path.is_relative_to(ROOT / axis.package)
    ]

    assert not wrong, "\n".join(wrong)
