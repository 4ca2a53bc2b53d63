"""Proposer and solver: one policy poses sums, and solves its own.

The proposer is paid for sums that one of two tries solves: those of which the solver learns most.
"""

from __future__ import annotations

import random
import re

from asyncrl import PromptRow, RolloutContext

_SUM = re.compile(r"(\d)\+(\d)")


class Examples:
    """Rows of both roles: a digit asks for a sum with it, and a sum for its value."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def row(self, index: int) -> dict[str, object]:
        """Return a sum to pose or to solve, with an answer for the warm-up."""
        draw = random.Random(f"{self._seed}:{index}")
        one, other = draw.randint(0, 9), draw.randint(0, 9)
        if draw.random() < 0.5:
            return {"prompt": f"p{one}:", "label": f"{one}+{other}"}
        return {"prompt": f"s{one}+{other}=", "label": str(one + other)}


class Proposals:
    """Digits for which a sum is to be posed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def row(self, index: int) -> dict[str, object]:
        """Return a digit."""
        return {"prompt": f"p{random.Random(f'{self._seed}:{index}').randint(0, 9)}:"}


def examples(seed: int) -> Examples:
    """Return the rows of the warm-up."""
    return Examples(seed)


def rows(seed: int) -> Proposals:
    """Return the rows of a run."""
    return Proposals(seed)


async def rollout(row: PromptRow, context: RolloutContext) -> None:
    """Pose a sum, and try to solve it twice; each of the three turns has its own reward."""
    posed = await context.generate(context.tokenizer.encode(str(row.prompt)))
    found = _SUM.fullmatch(posed.text)
    if found is None or found[1] != str(row.prompt)[1]:
        context.outcome(turn_rewards=[0.0], metrics={"posed": 0.0})
        return
    value, prompt = str(int(found[1]) + int(found[2])), context.tokenizer.encode(f"s{posed.text}=")
    right = [float((await context.generate(prompt)).text == value) for _ in range(2)]
    context.outcome(turn_rewards=[float(sum(right) == 1.0), *right], metrics={"posed": 1.0, "solved": sum(right) / 2})
