"""The rows of a prompt that is a turn of live traffic, or several that are siblings."""

from __future__ import annotations

from topics.prompts import PromptRow
from topics.turns import TurnAdmitted


def live_rows(admitted: TurnAdmitted) -> list[PromptRow]:
    """Return a row for each member of the group, which names its turn and reward: rollout workers read the tokens."""
    return [
        PromptRow(
            "",
            metadata={
                "turn": turn.turn_id,
                "session": turn.session,
                "tenant": admitted.tenant,
                "by": turn.by,
                "reward": turn.reward,
            },
        )
        for turn in admitted.turns
    ]
