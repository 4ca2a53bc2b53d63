"""Results of a trajectory that its rollout function sets."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.rewards.score import read_metrics
from topics.trajectories import ARTEFACT_BYTES, ARTEFACTS, TURNS, Outcome


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the result of several calls of `RolloutContext.outcome`, the oldest first."""
    whole = Outcome()
    for outcome in outcomes:
        whole.reward = whole.reward if outcome.reward is None else outcome.reward
        whole.metrics |= outcome.metrics
        whole.artefacts |= outcome.artefacts
        whole.turn_rewards = outcome.turn_rewards or whole.turn_rewards
    return whole


def check_outcome(outcome: Outcome) -> None:
    """Raise a ValueError where a trajectory has more than may be kept of it."""
    read_metrics(outcome.metrics)
    if len(outcome.turn_rewards) > TURNS:
        raise ValueError(f"found {len(outcome.turn_rewards)} turn rewards, expected at most {TURNS} for one trajectory")
    size = sum(map(len, outcome.artefacts.values()))
    if len(outcome.artefacts) > ARTEFACTS or size > ARTEFACT_BYTES:
        found, expected = f"{len(outcome.artefacts)} artefacts of {size:,} bytes", f"{ARTEFACTS} of {ARTEFACT_BYTES:,}"
        raise ValueError(f"found {found} in all, expected at most {expected} for one trajectory; give less")


def as_bytes(name: str, value: str | bytes) -> bytes:
    """Return an artefact as bytes."""
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if not isinstance(value, str):
        raise ValueError(f"the artefact {name!r} is a {type(value).__name__}; expected text or bytes")
    return value.encode(errors="backslashreplace")
