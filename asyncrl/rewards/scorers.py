"""Rewards that come with the library and run in sandbox children: `math` and `reasoning-gym`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from asyncrl.data.procedural import make_dataset, no_syntax_warnings


def make_math() -> Callable[..., float]:
    """Make the reward that is 1.0 where the completion's last answer equals the label as mathematics, else 0.0.

    A label with neither `$` nor `\\boxed` is read as a bare LaTeX or plain expression. The comparison is that of the
    math-verify package; the sandbox sets the time limit.
    """
    from math_verify import parse, verify  # takes 0.2 s and 50 MB, which other children need not pay

    # Both modules warn at every call without a time limit that the caller must have one.
    for module in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(module).setLevel(logging.ERROR)

    @lru_cache(maxsize=4096)
    def gold(label: str) -> list[Any]:
        answer: list[Any] = parse(label if "$" in label or "\\boxed" in label else f"${label}$", parsing_timeout=None)
        if not answer:
            raise ValueError(f"label {label!r} is no mathematical answer")
        return answer

    def math(completion: str, label: Any) -> float:
        return float(verify(gold(str(label)), parse(completion, parsing_timeout=None), timeout_seconds=None))

    return math


def make_reasoning_gym(dataset: str | None) -> Callable[..., float]:
    """Make the reward in [0, 1] that is the score of a reasoning-gym dataset's own scorer.

    The answer is the text between the last `<answer>` and `</answer>`, or else the whole completion, stripped.

    Args:
        dataset: its name; without one it is each row's `metadata["source_dataset"]`, as `ReasoningGymSource` wrote it.

    Raises:
        DataError: when there is no such dataset.
    """
    with no_syntax_warnings():
        from reasoning_gym.utils import extract_answer

    @lru_cache(maxsize=64)
    def scorer(name: str, options: bytes) -> Any:
        return make_dataset(name, msgspec.json.decode(options), seed=0)

    def reasoning_gym(completion: str, prompt: Any, label: Any = None, metadata: Any = None) -> float:
        name = dataset or metadata.get("source_dataset")
        if not name:
            raise ValueError("the row's metadata has no 'source_dataset'; name the reward reasoning-gym:NAME")
        options = msgspec.json.encode(metadata.get("source_options") or {})
        if name in ("arc_agi", "rearc"):  # compare boards of tuples, which travel as lists
            metadata = _as_tuples(metadata)
        answer = extract_answer(completion)
        entry = {"question": prompt, "answer": label, "metadata": metadata}
        return float(scorer(name, options).score_answer(completion.strip() if answer is None else answer, entry))

    if dataset:
        scorer(dataset, b"{}")
    return reasoning_gym


def _as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_tuples(item) for key, item in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
