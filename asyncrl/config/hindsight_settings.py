"""Settings of learning from hints: the table `[live.hindsight]`.

The comment at a field, beside or above it, is its documentation: `asyncrl settings` and docs/settings.md print it.
"""

from __future__ import annotations

from typing import Literal

from asyncrl.config.setting_types import Count, NonNegative, Rate, Settings


class HindsightSettings(Settings):
    """Hindsight distillation of live turns: what a frozen copy of the policy makes of a reply behind a hint."""

    w_rl: NonNegative = 1.0  # With `combine`: weight of the reward in the advantage of each token.
    w_opd: NonNegative = 1.0  # Weight of the differences of log-probs in it.
    clip: Rate = 1.0  # Bound of a difference, in nats.
    # Tokens of each place that the policy finds most probable, which all have a difference; 0: the sampled token alone.
    top_k: Count = 0
    # Text behind the last message of the prompt that the teacher is shown; {hint} stands for the judge's.
    wording: str = "\n\n[user's hint / instruction]\n{hint}"


def estimator_of(method: Literal["binary", "distillation", "combine"], advantage: str) -> str:
    """Return the name in `ADVANTAGES` of the estimator of live turns.

    Args:
        method: `live.method`.
        advantage: `live.advantage`, of the reward alone.
    """
    if method == "binary":
        return advantage
    if method == "distillation":
        return "hindsight"
    return "combine" if advantage == "none" else f"combine_{advantage}"
