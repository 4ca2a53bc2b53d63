"""An environment of kind `text`: guess a digit in a few tries, and read whether it is larger or smaller."""

from __future__ import annotations

import random


class Guess:
    """Prompts are `9:` for digits up to 9; the environment answers `<` or `>`."""

    def __init__(self, largest: int = 9, tries: int = 3) -> None:
        self._largest, self._tries = largest, tries

    def reset(self, *, seed: int) -> tuple[str, dict[str, object]]:
        """Choose a digit."""
        self._digit = random.Random(seed).randint(0, self._largest)
        self._left = self._tries
        return f"{self._largest}:", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Compare the first character of a reply with the digit."""
        self._left -= 1
        guessed = int(action[0]) if action[:1].isdecimal() else -1
        hit = guessed == self._digit
        return "<" if guessed > self._digit else ">", float(hit), hit, self._left == 0, {}
