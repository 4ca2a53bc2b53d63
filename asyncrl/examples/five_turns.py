"""An example rollout function: five turns, each an answer of the policy and a reply of a tool.

    [task]
    rollout = "five_turns.py:rollout"

The policy writes a word backwards and learns after each try how many letters are right. The reward judges the last try.
This file needs no code for weight updates, killed workers or resumption. The context repeats the answers it has given
once, and the function continues on another machine as if nothing had happened.
"""

from __future__ import annotations

from asyncrl import PromptRow, RolloutContext

TURNS = 5


def letters_right(answer: str, label: str) -> int:
    """The tool. Sync or async, it may do anything; its answer is recorded before the policy sees it."""
    return sum(given == wanted for given, wanted in zip(answer.strip(), label, strict=False))


async def rollout(row: PromptRow, context: RolloutContext) -> None:
    """One trajectory: tokens are only ever appended, so all turns train as one segment."""
    tokens = context.tokenizer.encode_prompt(row, max_tokens=None).tolist()
    for turn in range(TURNS):
        answer = await context.generate(tokens)
        tokens += answer.tokens.tolist()
        context.completion = answer.text
        if turn < TURNS - 1:
            right = await context.tool("letters_right", letters_right, answer.text, row.label)
            tokens += context.tokenizer.encode_plain(f"{right}=").tolist()
