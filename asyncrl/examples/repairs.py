"""One-line programs with a wrong operator, for `asyncrl up coder`: the policy repairs them, and tests run them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

OPERATORS = "+-*"
OPERANDS = [*itertools.product("xy", "xy123")]
"""Programs are an operator between two operands: an arithmetic expression of x and y, which the shell evaluates."""

_TEST = "x={x} y={y}; read -r program < f; [ $(($program)) = {result} ]"
_CHECK = """exec 2> /dev/null
trap '[ $? = 2 ] && echo "?"' EXIT   # the shell cannot read the program
read -r program < f
while IFS=, read -r x y result; do
    given=$(($program))
    [ $given = $result ] || {{ echo "{objection}"; exit 1; }}
done << END
{cases}
END
"""


class Repairs:
    """Rows: a program, and examples of what it should give."""

    objection = "$x,$y:$given"  # of the check, as the shell expands it

    def __init__(self, seed: int, cases: int) -> None:
        self._seed, self._cases = seed, cases

    def row(self, index: int) -> dict[str, object]:
        """Return a program with a wrong operator, and its tests."""
        draw = random.Random(f"{self._seed}:{index}")
        right, wrong = draw.sample(OPERATORS, 2)
        left, other = draw.choice(OPERANDS)
        numbers = draw.sample([*itertools.permutations(range(2, 6), 2)], self._cases)
        results = [(x, y, value_of(f"{left}{right}{other}", x, y)) for x, y in numbers]
        cases = "\n".join(f"{x},{y},{result}" for x, y, result in results[:2])
        tests = {f"{x},{y}": ["sh", "-c", _TEST.format(x=x, y=y, result=result)] for x, y, result in results}
        program = f"{left}{wrong}{other}"
        files = {"f": program, "check": _CHECK.format(cases=cases, objection=self.objection)}
        prompt = self.prompt(program, results[:2])
        return {"prompt": prompt, "label": f"{left}{right}{other}", "metadata": {"files": files, "tests": tests}}

    def prompt(self, program: str, cases: Sequence[tuple[int, int, int]]) -> list[dict[str, str]]:
        """Return the conversation that asks for the repair.

        Args:
            cases: x, y and the result of each.
        """
        shown = " ".join(f"{x},{y}={result}" for x, y, result in cases)
        return [{"role": "user", "content": f"{program} {shown}"}]


def value_of(program: str, x: int, y: int) -> int:
    """Return the result of a program."""
    left, operator, right = [*program]
    one, other = ({"x": x, "y": y}.get(name) or int(name) for name in (left, right))
    return {"+": one + other, "-": one - other, "*": one * other}[operator]


def rows(seed: int, cases: int = 4) -> Repairs:
    """Return the rows of a run.

    Args:
        cases: tests of each program; the prompt shows two of them.
    """
    return Repairs(seed, cases)
