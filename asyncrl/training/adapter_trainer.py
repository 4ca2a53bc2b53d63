"""The part of a trainer that publishes adapters alone."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from asyncrl.training.base_trainer import BaseTrainer, OptimizerState
from asyncrl.training.host_copy import Source
from asyncrl.weights.adapters import ADAPTER, BaseModel, PublishedAdapter, digest_of_model
from asyncrl.weights.directories import CheckpointError


class AdapterOptimizer(OptimizerState, Protocol):
    """The state of an optimiser whose model may have adapters."""

    def first_other(self, directory: Path) -> str:
        """Return the name of a frozen weight that differs from a model's; empty if there are none."""


class AdapterTrainer(BaseTrainer):
    """See `Trainer`: versions are adapters where the settings say so, and else whole models."""

    _own: AdapterOptimizer
    _moved = ""  # name of a frozen weight that is not the model's

    def _publish_adapters(self) -> None:
        """Let versions be adapters, if the settings say so."""
        lora = self.settings.lora
        if lora is None or not lora.published:
            return
        assert self.source is not None
        sources = super()._sources(whole=True)
        kept = [one.name for one in sources if one.dtype != self._dtype]
        dtype = str(self._dtype).removeprefix("torch.")
        self.adapter = PublishedAdapter(BaseModel(digest_of_model(self.source), dtype, kept), lora.config())

    def _sources(self, *, whole: bool) -> list[Source]:
        if whole or self.adapter is None:
            return super()._sources(whole=whole)
        if self._moved:
            raise CheckpointError(
                f"{self._moved} has other values than in {self.source}, to which engines would add the adapter: "
                "it was trained before there were adapters, or the files have changed since; "
                'put them back, or set learner.lora.publish = "merged"'
            )
        return [one for one in self._own.sources() if one.stem == ADAPTER]

    def load(self, directory: Path) -> None:
        super().load(directory)
        if self.adapter is None:
            return
        assert self.source is not None
        with self.placed():
            self._moved = self._own.first_other(self.source)
            if dist.is_initialized() and (ranks := dist.get_world_size()) > 1:  # all are to say the same
                found = [""] * ranks
                dist.all_gather_object(found, self._moved)
                self._moved = max(found)
