"""Devices, slots and batch of a run, from the rates of its engine and its trainer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from asyncrl.algorithms.lag import USUAL_SIGMA, slots_within_lag
from asyncrl.config.slots import LEAST

_NEAR_BEST = 0.95  # share of the best rate that fewer requests have to reach
_WORTH = 1.1  # gain for which an engine and the learner share a GPU


class Measured(msgspec.Struct, frozen=True):
    """Rates of one server and one rank, in sampled tokens per second, each with the machine to itself."""

    engine: Mapping[int, float]  # by concurrent requests
    trainer: float
    lengths: Sequence[int]  # tokens of the answers

    @property
    def best(self) -> float:
        """The best rate of the server."""
        return max(self.engine.values())

    @property
    def knee(self) -> int:
        """The fewest requests that reach nearly the best rate."""
        return min(count for count, rate in self.engine.items() if rate >= _NEAR_BEST * self.best)

    def engine_at(self, requests: float) -> float:
        """Return the rate of the server with some requests, on a line between the measured ones."""
        return float(np.interp(requests, [0, *self.engine], [0.0, *self.engine.values()]))

    @property
    def sigma(self) -> float:
        """Sigma of the logarithm of the lengths; the usual one if there are too few."""
        logs = [math.log(length) for length in self.lengths if length > 0]
        return statistics.pstdev(logs) if len(logs) > 1 else USUAL_SIGMA


class Devices(msgspec.Struct, frozen=True):
    """The processes that compute, and their rate."""

    engines: int
    ranks: int  # of the learner
    shared: bool  # an engine and the learner take the time of one GPU, or of one core

    def tokens_per_s(self, engine: float, trainer: float) -> float:
        """Return the rate by those of a server and a rank that have a device to themselves."""
        if self.shared:
            return min(trainer, self.engines * engine / (1 + engine / trainer))
        return min(self.engines * engine, self.ranks * trainer)


class Rows(msgspec.Struct, frozen=True):
    """The batches of a run."""

    batch_groups: int
    group_size: int
    max_lag: int


class Proposal(msgspec.Struct, frozen=True):
    """Proposed settings, and what they give. Shares are between 0 and 1."""

    devices: Devices
    slots: int  # of all workers
    tokens_per_s: float  # at most
    engine_busy_share: float
    learner_busy_share: float
    best_batch_groups: int  # the fewest with which the slots that the engines want leave few tokens too old
    best_tokens_per_s: float  # with these


def proposal(measured: Measured, rows: Rows, devices: Devices) -> Proposal:
    """Propose slots: as many as the engines want, and no more than leave few tokens too old for their batch.

    Args:
        measured: rates.
        rows: the batches as they are.
        devices: that the run has.
    """
    wanted, groups = measured.knee * devices.engines, rows.batch_groups
    while rows.max_lag and _slots(rows, groups, measured.sigma) < wanted:
        groups += 1
    slots = max(rows.group_size, min(wanted, max(LEAST, _slots(rows, rows.batch_groups, measured.sigma))))
    engine = measured.engine_at(slots / devices.engines)
    rate = devices.tokens_per_s(engine, measured.trainer)
    return Proposal(
        devices,
        slots,
        rate,
        engine_busy_share=min(1.0, rate / (devices.engines * engine)),
        learner_busy_share=min(1.0, rate / (devices.ranks * measured.trainer)),
        best_batch_groups=groups,
        best_tokens_per_s=devices.tokens_per_s(measured.best, measured.trainer),
    )


def _slots(rows: Rows, groups: int, sigma: float) -> int:
    return slots_within_lag(groups * rows.group_size, rows.max_lag, sigma=sigma)


def devices_of(engine: float, trainer: float, gpus: int) -> Devices:
    """Divide GPUs among servers and ranks, one for each.

    A learner that shares the GPU of a server takes its time from this server.

    Args:
        engine: tokens per second of a server that has a GPU.
        trainer: the same of a rank.
        gpus: of both, at least 1.
    """
    shared = Devices(gpus, 1, shared=True)
    apart = [Devices(count, gpus - count, shared=False) for count in range(1, gpus)]
    best = max(apart, key=lambda one: (one.tokens_per_s(engine, trainer), one.engines), default=shared)
    gain = shared.tokens_per_s(engine, trainer) / best.tokens_per_s(engine, trainer)
    return shared if gain > _WORTH else best
