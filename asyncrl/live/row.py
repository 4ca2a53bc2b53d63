"""The row of a prompt that is a turn of live traffic."""

from __future__ import annotations

from topics.prompts import PromptRow
from topics.turns import TurnAdmitted


def row_of(turn: TurnAdmitted) -> PromptRow:
    """Return the row that names a turn and its reward: the rollout worker reads its tokens."""
    named = {"turn": turn.turn_id, "session": turn.session, "tenant": turn.tenant, "by": turn.by}
    return PromptRow("", metadata={**named, "reward": turn.reward})
