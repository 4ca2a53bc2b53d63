"""The programs of `asyncrl up coder`, asked for in English after one example of a repair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.examples.repairs import Repairs

_QUESTION = "Repair {program} so that {cases}. Write the program only."


class ChatRepairs(Repairs):
    """Rows of `Repairs` for a pretrained model. One test joins all cases, so the reward is 1 or 0."""

    objection = "x=$x, y=$y gives $given"

    def row(self, index: int) -> dict[str, Any]:
        """Return a program with a wrong operator, and its test."""
        row: dict[str, Any] = super().row(index)
        tests = row["metadata"]["tests"].values()
        row["metadata"]["tests"] = {"all": ["sh", "-c", " && ".join(script for *_, script in tests)]}
        return row

    def prompt(self, program: str, cases: Sequence[tuple[int, int, int]]) -> list[dict[str, str]]:
        """Return one repair as an example, and the question."""
        turns = [_asked("y+2", [(4, 5, 10), (3, 4, 8)]), "y*2", _asked(program, cases)]
        roles = ["user", "assistant", "user"]
        return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]


def rows(seed: int, cases: int = 4) -> ChatRepairs:
    """Return the rows of a run.

    Args:
        cases: cases of each program; the prompt shows two of them.
    """
    return ChatRepairs(seed, cases)


def _asked(program: str, cases: Sequence[tuple[int, int, int]]) -> str:
    shown = " and ".join(f"x={x}, y={y} gives {result}" for x, y, result in cases)
    return _QUESTION.format(program=program, cases=shown)
