"""Settings of supervision: the table `[supervision]`.

The comment at a field, beside or above it, is its documentation: `asyncrl settings` and docs/settings.md print it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncrl.config.setting_types import Positive, Seconds, Settings


class SupervisionSettings(Settings):
    """Liveness of all processes; spares and snapshots of the keepers (single writers of a log)."""

    # Seconds without a heartbeat after which a process is killed and started again, and a spare takes over.
    silence_s: Seconds = 10.0
    # Standby processes of prompter, buffer, learner and sessions each; one takes over when the active one falls silent.
    spares: Annotated[int, Meta(ge=0, le=4)] = 0
    # Messages (those above 512 bytes count several times) after which a keeper puts what it knows on its log.
    snapshot_every: Positive = 20_000
    # Deaths of a process in a row after which it is not started again and the run stops. The engine actor of an
    # external server is always started again.
    deaths: Positive = 8
    # Longest pause before a process is started again; the first is 0.2 s, and each further one twice as long.
    restart_pause_s: Seconds = 5.0
    # Seconds of life in which the run got something done (a step, a trajectory's tokens, a whole reply to a user), or
    # 15 times as many, after which its deaths count anew.
    healthy_s: Seconds = 20.0
