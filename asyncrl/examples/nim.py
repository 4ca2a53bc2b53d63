"""Self-play: the policy plays Nim against a frozen model. Each move takes one to three sticks; the last stick wins."""

from __future__ import annotations

import random

from asyncrl import PromptRow, RolloutContext


class Nim:
    """Games that the first player can win, and a random move for each, from which the warm-up learns the rules."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def row(self, index: int) -> dict[str, object]:
        """Return a number of sticks."""
        draw = random.Random(f"{self._seed}:{index}")
        sticks = draw.choice([1, 2, 3, 5, 6, 7, 9])
        return {"prompt": f"{sticks}:", "label": str(draw.randint(1, min(3, sticks)))}


def rows(seed: int) -> Nim:
    """Return the games of a run."""
    return Nim(seed)


async def rollout(row: PromptRow, context: RolloutContext) -> None:
    """Play one game: 1.0 for the winner, and an impossible move loses."""
    left, moves = int(str(row.prompt).rstrip(":")), 0
    while True:
        for own in (True, False):
            tokens = context.tokenizer.encode(f"{left}:")
            answer = await (context.generate(tokens) if own else context.opponent(tokens))
            moves += own
            taken = int(answer.text) if answer.text in ("1", "2", "3") else 0
            left -= taken
            if not taken or left <= 0:
                won = own == (bool(taken) and left == 0)
                context.outcome(float(won), metrics={"moves": moves, "impossible": float(not taken or left < 0)})
                return
