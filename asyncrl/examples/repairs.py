"""One-line programs with one wrong place, for `asyncrl up coder`: the policy repairs them, and tests run them."""

from __future__ import annotations

import itertools
import random

OPERATORS = "+-*"
FORMS = [
    f"{left}{operator}{right}"
    for left, operator, right in itertools.product("xy123", OPERATORS, "xy123")
    if {left, right} & {"x", "y"}
]
"""Programs: an arithmetic expression of x and y, which the shell evaluates."""

_TEST = 'x={x} y={y}; echo "$(($(cat f)))" | grep -qx -- "{result}"'
_CHECK = """(for case in {cases}; do
    set -- $(echo $case | tr , ' '); x=$1; y=$2
    result=$(($(cat f)))
    [ $result = $3 ] || {{ echo "$x,$y:$result"; exit 1; }}
done) 2>/dev/null
code=$?
[ $code = 2 ] && echo "?"   # the shell cannot read the program
exit $code
"""


class Repairs:
    """Rows: a program, and examples of what it should give."""

    def __init__(self, seed: int, cases: int) -> None:
        self._seed, self._cases = seed, cases

    def row(self, index: int) -> dict[str, object]:
        """Return a program with one wrong place, and its tests."""
        draw = random.Random(f"{self._seed}:{index}")
        right = draw.choice(FORMS)
        place, letters = draw.choice([(0, "xy123"), (1, OPERATORS), (2, "xy123")])
        wrong = right
        while wrong == right or wrong not in FORMS:
            wrong = right[:place] + draw.choice(letters) + right[place + 1 :]
        numbers = draw.sample([(x, y) for x in range(2, 10) for y in range(2, 10) if x != y], self._cases)
        results = [(x, y, value_of(right, x, y)) for x, y in numbers]
        shown = " ".join(f"{x},{y}={result}" for x, y, result in results[:2])
        cases = " ".join(f"{x},{y},{result}" for x, y, result in results[:2])
        tests = {f"{x},{y}": ["sh", "-c", _TEST.format(x=x, y=y, result=result)] for x, y, result in results}
        files = {"f": wrong, "check": _CHECK.format(cases=cases)}
        prompt = [{"role": "user", "content": f"{wrong} {shown}"}]
        return {"prompt": prompt, "label": right, "metadata": {"files": files, "tests": tests}}


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
