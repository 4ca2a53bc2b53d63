"""How far versions are from the reference on live turns, as the learner measures it; and which may not be promoted."""

from __future__ import annotations

from statistics import fmean

import msgspec

from topics.batches import BatchTrained

_WINDOW = 8  # steps whose mean counts
_KEPT = 1024  # steps

FIGURE = "live_reference_kl"  # of `batch.trained`


class Measured(msgspec.Struct, frozen=True):
    """A step that was trained, with live turns in it."""

    lineage: int
    step: int
    nats: float  # per token


class Divergence(msgspec.Struct):
    """The newest steps, as plain data."""

    measured: list[Measured] = []  # the newest last; some were trained again, on a later lineage

    def trained(self, trained: BatchTrained) -> None:
        """Take note of a step. A step without live turns has no live turns when it is trained again either."""
        if FIGURE in trained.metrics:
            one = Measured(trained.lineage, trained.step, trained.metrics[FIGURE])
            self.measured = [*self.measured, one][-_KEPT:]

    def beyond(self, lineage: int, version: int, bound: float) -> str:
        """Return why a version may not be promoted; "" if it may, or nothing is known about it."""
        newest = self._behind(lineage, version)[:_WINDOW]
        if not (bound and newest) or fmean(newest) <= bound:  # NaN is beyond every bound
            return ""
        return (
            f"version {version} is {fmean(newest):.4g} nats per token from the reference on live turns; "
            f"live.safety.kl_bound is {bound:g}"
        )

    def _behind(self, lineage: int, version: int) -> list[float]:
        """Return the nats of the steps that a version comes from, the newest first."""
        found, before = [], version + 1
        for one in reversed(self.measured):
            if one.lineage <= lineage and one.step < before:  # else it has no part in it, or was trained again
                before = one.step
                found.append(one.nats)
        return found
