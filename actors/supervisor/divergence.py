"""How far versions are from the reference on live turns, as the learner measures it; and which may not be promoted."""

from __future__ import annotations

from statistics import fmean

import msgspec

from topics.batches import BatchTrained

_WINDOW = 8  # steps whose mean counts
_KEPT = 1024  # steps

FIGURE = "live_reference_kl"  # of `batch.trained`


class Divergence(msgspec.Struct):
    """Nats per token of the newest steps, as plain data."""

    by_step: dict[int, float] = {}

    def trained(self, trained: BatchTrained) -> None:
        """Take note of a step; later ones that were trained before it was trained again are forgotten."""
        self.by_step = {step: nats for step, nats in self.by_step.items() if step < trained.step}
        if FIGURE in trained.metrics:
            self.by_step[trained.step] = trained.metrics[FIGURE]
        for step in sorted(self.by_step)[:-_KEPT]:
            del self.by_step[step]

    def beyond(self, version: int, bound: float) -> str:
        """Return why a version may not be promoted; "" where it may, or nothing is known of it."""
        newest = [self.by_step[step] for step in sorted(self.by_step) if step <= version][-_WINDOW:]
        if not (bound and newest and fmean(newest) > bound):
            return ""
        return (
            f"version {version} is {fmean(newest):.4g} nats per token from the reference on live turns; "
            f"live.safety.kl_bound is {bound:g}"
        )
