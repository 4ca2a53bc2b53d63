"""The reward `math`, which runs in a child process."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_DOLLAR = re.compile(r"(?<!\\)\$")  # no price
_BASE = re.compile(r"(?<=\d)_\{?(\d+)\}?")
_REPEATING = re.compile(r"(\d+)\.(\d*)\\overline\{(\d+)\}")
_DEGREES = re.compile(r"\\(sin|cos|tan)(\s*\(?\s*)(\d+)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})")
_ROUNDING = 1e-12  # relative, of decimals as floats
_LAST_DOT = re.compile(r"(?<=\d)\.(?=\s*\})")


def make_math() -> Callable[..., float]:
    """Make the reward that is 1.0 where the completion's last answer equals the label as mathematics, else 0.0.

    A label with neither a `$` that opens mathematics nor `\\boxed` is read as a bare LaTeX or plain expression. The
    comparison is that of the math-verify package, but decimals are compared exactly, and numbers in two bases differ.
    The child pool sets the time limit.

    Raises:
        ValueError: by the reward: a label is no text and no number, or no mathematics.
    """
    from math_verify import parse, verify  # takes 0.2 s and 50 MB, which other children need not pay

    # Both modules warn at every call without a time limit that the caller must have one.
    for module in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(module).setLevel(logging.ERROR)

    @lru_cache(maxsize=4096)
    def gold(label: str) -> list[Any]:
        has_markup = _DOLLAR.search(label) or "\\boxed" in label
        answer: list[Any] = parse(_readable(label if has_markup else f"\\boxed{{{label}}}"), parsing_timeout=None)
        if not answer:
            raise ValueError(f"label {label!r} is no mathematical answer")
        return answer

    def math(completion: str, label: Any) -> float:
        if not isinstance(label, str | int | float):
            raise ValueError(f"label {str(label)[:80]!r} is a {type(label).__name__}, expected a text or a number")
        wanted, found = gold(str(label)), parse(_readable(completion), parsing_timeout=None)
        return float(verify(wanted, found, timeout_seconds=None) and _agree(wanted, found))

    return math


def _readable(text: str) -> str:
    """Rewrite notations that math-verify does not read: `7.` in a box, repeating decimals, sines of degrees."""

    def fraction(match: re.Match[str]) -> str:
        before, repeated = match[1] + match[2], match[3]
        below = (10 ** len(repeated) - 1) * 10 ** len(match[2])
        return f"\\frac{{{int(before + repeated) - int(before)}}}{{{below}}}"

    text = _DEGREES.sub(r"\\\1\2{\\frac{\3\\pi}{180}}", _LAST_DOT.sub("", text))
    return _REPEATING.sub(fraction, text)


def _agree(wanted: list[Any], found: list[Any]) -> bool:
    """Return whether two answers that math-verify takes for equal have the same bases, and decimals the same value.

    Args:
        wanted: the parsed label: expressions, then their text.
        found: the parsed completion.
    """
    if sorted(_BASE.findall(str(wanted[-1]))) != sorted(_BASE.findall(str(found[-1]))):
        return False
    one, other = wanted[0], found[0]
    decimals = all(
        getattr(number, "is_Float", False) or getattr(number, "is_Integer", False) for number in (one, other)
    )
    return not decimals or bool(abs(one - other) <= _ROUNDING * max(abs(one), abs(other)))
