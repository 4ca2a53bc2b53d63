"""Settings of what every step of RL is held against.

The comment at a field, beside or above it, is its documentation: `asyncrl settings` and docs/settings.md print it.
"""

from __future__ import annotations

from typing import Literal

from asyncrl.config.setting_types import NonNegative, Settings


class AssertionSettings(Settings):
    """Bounds on the gap between the log-probs of sampler and trainer, and on what is usual; 0 asserts nothing."""

    # Greatest `mismatch_k3` (nats per token) of the first step of RL: its tokens were sampled from the weights that
    # train on them, so that only arithmetic and sampling cuts make the two differ.
    first_k3: NonNegative = 0.0
    k3: NonNegative = 0.0  # Greatest `mismatch_k3` (nats per token) of any step of RL, with the lag of its tokens.
    # A step is an anomaly, and its trajectories are named, where its gradient norm is above so many times the median of
    # the 32 steps before, or its loss farther from their median than so many times the median of these distances
    # (which counts as at least 0.05: advantages that cancel leave losses of rounding).
    outlier: NonNegative = 10.0
    # What a step beyond a bound does: `report` lets the run go on with a finding, `stop` ends it before the step is
    # reported.
    broken: Literal["report", "stop"] = "report"
