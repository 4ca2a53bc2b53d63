"""Products that the policy cannot compute in its head, and a calculator that it may call.

The policy writes `CALC(123*45)`. The calculator's result is the next message of the conversation, and the policy
answers with it.
"""

from __future__ import annotations

import random
import re
from typing import Any

from asyncrl import PromptRow, RolloutContext

CALL = re.compile(r"CALC\((\d{1,6})\s*\*\s*(\d{1,6})\)")
RESULT = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # of SmolLM2's chat template


class Products:
    """An endless series of products of a three-digit and a two-digit number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def row(self, index: int) -> dict[str, Any]:
        """Return one question after another product as an example."""
        draw = random.Random(f"{self._seed}:{index}")
        a, b, x, y = (draw.randrange(low, 10 * low) for low in (100, 10, 100, 10))
        turns = [f"What is {x} * {y}?", f"CALC({x}*{y})", str(x * y), f"{x} * {y} is {x * y}.", f"What is {a} * {b}?"]
        roles = ["user", "assistant", "user", "assistant", "user"]
        messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
        return {"prompt": messages, "label": str(a * b)}


def rows(seed: int) -> Products:
    """Return the questions of a seed."""
    return Products(seed)


def multiply(a: str, b: str) -> str:
    """Return the product of two numbers."""
    return str(int(a) * int(b))


async def rollout(row: PromptRow, context: RolloutContext) -> None:
    """Sample an answer; if it calls the calculator, show the result and sample the final answer."""
    tokens = context.tokenizer.encode_prompt(row, max_tokens=None).tolist()
    first = await context.generate(tokens, max_new_tokens=32)
    context.completion = first.text
    if call := CALL.search(first.text):
        result = await context.tool("multiply", multiply, *call.groups())
        ended = "" if first.finish == "stop" else "<|im_end|>"
        tokens += first.tokens.tolist() + context.tokenizer.encode(ended + RESULT.format(result)).tolist()
        context.completion = (await context.generate(tokens, max_new_tokens=16)).text
    context.outcome(metrics={"calls": float(call is not None)})
