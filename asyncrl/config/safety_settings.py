"""Settings of what guards learning from live traffic: the table `[live.safety]`.

The comment at a field, beside or above it, is its documentation: `asyncrl settings` and docs/settings.md print it.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from asyncrl.config.setting_types import Count, Settings

_Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class SafetySettings(Settings):
    """Bounds of what is learnt from live turns, and of what the doctor reports about them."""

    # Greatest share of a batch's groups that are turns of one tenant, rounded up; others wait for the next batch.
    tenant_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    # Turns of a user with one and the same prompt and reply that are trained of a day, per gateway and among the newest
    # 4,096; 0: any number.
    repeats: Count = 0
    reward: Annotated[float, Meta(gt=0)] = 1.0  # Greatest absolute reward; a larger one is cut down to it.
    # Greatest share of 4-grams of a reply that occurred in it before; it is not trained above. 1: any.
    repetition: _Share = 0.95
    garbage: _Share = 0.2  # The same of its characters that no writing has.
    # Regular expression of a reply that asks its user needlessly, searched without regard to case; empty: none is.
    question: str = ""
    # Share of the newest 128 replies with a call of a tool that is none, above which the doctor reports it.
    invalid_calls: _Share = 0.1
    questions: _Share = 0.2  # The same of replies that ask needlessly.
    disagreement: _Share = 0.3  # The same of grades of judges against which users spoke.
    # Factor, up or down, by which the mean length of the newest 128 replies may differ from the first 128 of the run.
    length_drift: Annotated[float, Meta(gt=1)] = 3.0
