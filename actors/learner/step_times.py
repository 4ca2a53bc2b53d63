"""Seconds of the learner by phase, and the rate at which a step computed."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from asyncrl.config.settings import LearnerSettings
from asyncrl.config.trainers import TrainerCapability, trainer_kind
from asyncrl.errors import UNREADABLE, AsyncRLError
from asyncrl.telemetry.gpu_use import GpuMeter
from asyncrl.training.ranks import work_of, work_of_batch
from topics.batches import BatchPacked

T = TypeVar("T")


class StepTimes:
    """Seconds since the step before: of waiting (`wait_s`), fetching, publishing and saving; and those of the step.

    Publishing and saving count only until their copies exist: the rest runs during the next steps. What the learner
    publishes or saves while it waits for a batch is a part of `wait_s` too.
    """

    def __init__(self, model: Path, learner: LearnerSettings) -> None:
        self._seconds: dict[str, float] = {}
        self._learner = learner
        trains = trainer_kind(learner.trainer).can(TrainerCapability.MODEL) and not learner.lora.rank
        try:
            self._work = work_of(model) if trains else None
        except (KeyError, AsyncRLError, *UNREADABLE):  # an unknown family; of a broken file the trainer says more
            self._work = None
        self._peak = GpuMeter().peak_tflops if self._work and learner.device != "cpu" else None

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    async def of(self, phase: str, work: Awaitable[T]) -> T:
        """Do some work and add its seconds to a phase."""
        began = time.monotonic()
        try:
            return await work
        finally:
            self.add(phase, time.monotonic() - began)

    def take(self, packed: BatchPacked, train_s: float) -> dict[str, float]:
        """Return the figures of a step that took this long, and forget the phases before it.

        Returns:
            `train_s`, `wait_s` and the seconds of other phases; `train_tflops`: 1e12 operations of the model per second
            of training; `mfu`: share of the rate of all GPUs of the learner, if their rate is known.
        """
        found = {name: round(seconds, 4) for name, seconds in {"wait_s": 0.0, **self._seconds}.items()}
        self._seconds = {}
        found["train_s"] = round(train_s, 4)
        if self._work is not None and packed.objective.moves_policy and train_s:
            rate = work_of_batch(packed, self._work, shared=self._learner.share_prefixes) / train_s / 1e12
            found["train_tflops"] = round(rate, 6)
            if self._peak is not None:
                found["mfu"] = round(rate / self._peak / self._learner.ranks, 4)
        return found
