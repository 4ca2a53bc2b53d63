"""Questions about topics, and their reward: the share of a rubric that an answer meets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from asyncrl import Rubric

TOPICS = ("bread", "cheese", "rain", "snow", "trains", "ships", "cats", "roses", "oaks", "copper", "chess", "maps")
FORMS = ("What do you know about {}?", "Tell me about {}.", "Why do people like {}?", "Describe {}.")

WISH = "Answer in one short sentence."

reward = Rubric.read(Path(__file__).with_name("rubric.toml")).grade


class Questions:
    """An endless series of questions."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def row(self, index: int) -> dict[str, Any]:
        """Return one question."""
        draw = random.Random(f"{self._seed}:{index}")
        question = f"{draw.choice(FORMS).format(draw.choice(TOPICS))} {WISH}"
        return {"prompt": [{"role": "user", "content": question}]}


def rows(seed: int) -> Questions:
    """Return the questions of a seed."""
    return Questions(seed)
