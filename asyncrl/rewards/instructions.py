"""Rewards of instruction following: `ifbench` and `ifeval`, by the checks of the lighteval package."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from asyncrl.errors import FunctionError

INSTRUCTION_REWARDS = ("ifbench", "ifeval")
"""Rewards of this module; each is the name of a package of lighteval's tasks."""


def make_instructions(benchmark: str) -> Callable[..., dict[str, float]]:
    """Make the reward that is 1.0 where a completion follows all instructions of its row, else 0.0.

    A row's `metadata` has `instruction_id_list`, names of checks, and `kwargs`, one mapping of arguments for each, as
    the rows of the two data sets have them; an argument of None is none. Text before `</think>` is ignored, and an
    empty answer follows nothing. The metric `followed` is the share of instructions that were followed.
    Source: the strict accuracy of IFEval (arXiv 2311.07911, section 2.2) and of IFBench (arXiv 2507.02833, section 2).

    Args:
        benchmark: one of `INSTRUCTION_REWARDS`.

    Raises:
        FunctionError: the package is not installed.
    """
    try:
        registry = importlib.import_module(f"lighteval.tasks.tasks.{benchmark}.instructions_registry")
    except ImportError as error:
        raise FunctionError(
            f"the reward {benchmark!r} needs the package {error.name}, which is not installed; "
            "docs/guides/write-a-reward.md says what to install where reward workers run"
        ) from error
    checks: dict[str, Any] = registry.INSTRUCTION_DICT

    def instructions(completion: str, prompt: Any, metadata: Any) -> dict[str, float]:
        names, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs")
        if not isinstance(names, list) or not isinstance(arguments, list) or not 0 < len(names) == len(arguments):
            raise ValueError(
                f"metadata has instruction_id_list = {names!r} and kwargs = {arguments!r}; "
                "expected two lists of the same length, not empty"
            )
        if unknown := [name for name in names if name not in checks]:
            raise ValueError(f"instruction {unknown[0]!r} is no check of {benchmark}; it has {', '.join(checks)}")
        answer, text = completion.rpartition("</think>")[2], _question(prompt)
        followed = [
            bool(answer.strip()) and _follows(checks[name], name, given, text, answer)
            for name, given in zip(names, arguments, strict=True)
        ]
        return {"reward": float(all(followed)), "followed": sum(followed) / len(followed)}

    return instructions


def _follows(check: Any, name: str, arguments: dict[str, Any], prompt: str, answer: str) -> bool:
    instruction = check(name)
    instruction.build_description(**{key: value for key, value in arguments.items() if value is not None})
    needed = instruction.get_instruction_args()
    if needed and "prompt" in needed:
        instruction.build_description(prompt=prompt)
    return bool(instruction.check_following(answer))


def _question(prompt: Any) -> str:
    """The prompt, or the newest message of the user in a conversation."""
    if isinstance(prompt, str):
        return prompt
    return next((str(message.get("content")) for message in reversed(prompt) if message.get("role") == "user"), "")
