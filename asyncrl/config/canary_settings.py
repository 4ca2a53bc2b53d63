"""Settings of canaries: the table `[weights.canary]`.

The comment at a field, beside or above it, is its documentation: `asyncrl settings` and docs/settings.md print it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncrl.config.setting_types import NonNegative, Positive, Settings


class CanarySettings(Settings):
    """Canaries: versions that a share of sessions is answered by before they are promoted to the channel `live`."""

    # Share of the sessions that a version gets which the gate passes, or the newest one; 0: the gate promotes it at
    # once. `asyncrl weights promote --canary` names a share of its own.
    share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    # Whether the newest version becomes a canary whenever there is none: what is live follows training by live reward.
    newest: bool = False
    turns: Positive = 64  # Graded turns, of the canary and of the others, that are compared.
    # The canary is promoted where its mean reward is at least that of the others less this; else it is rolled back.
    margin: NonNegative = 0.1
