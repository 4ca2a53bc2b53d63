"""The record of a step that the learner publishes."""

from __future__ import annotations

from actors.learner.rank import StepResult
from topics.batches import BatchPacked, BatchTrained


def trained(packed: BatchPacked, result: StepResult, sequence: int, *, lineage: int, skipped: bool) -> BatchTrained:
    """Return the record of a step.

    Args:
        sequence: of the batch in its log.
    """
    stats = result.stats
    return BatchTrained(
        step=packed.step,
        lineage=lineage,
        stage=packed.stage,
        metrics=result.metrics,
        lags={-1: stats.tokens_trained} if packed.stage == "warmup" else stats.lag_histogram,
        masked=stats.tokens_stale,
        rewards=[stats.reward_mean, stats.reward_std],
        trajectories=stats.trajectories,
        batch_sequence=sequence,
        skipped=skipped,
        anomaly=result.anomaly,
    )
