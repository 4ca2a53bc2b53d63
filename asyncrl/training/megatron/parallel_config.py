"""The layout of a model over the ranks of a learner: how its layers and products are divided."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from asyncrl.algorithms.packing import MULTIPLE
from asyncrl.config.settings import LearnerSettings
from asyncrl.data.model_dir import ModelError
from asyncrl.engine.embedded.config import ModelConfig


class Layout(NamedTuple):
    """Sizes of the groups of ranks. Each rank has a place in one group of each kind, as megatron-core orders them."""

    tensor: int = 1  # ranks that share each product, and the tokens between products
    pipeline: int = 1  # stages of consecutive layers
    context: int = 1  # ranks that share the tokens of each document
    virtual: int = 1  # chunks of consecutive layers in each stage, which the stages take in turn
    expert: int = 1  # ranks of a stage, of one replica or of several, that share the experts
    expert_tensor: int = 1  # such ranks that share the matrices of each expert
    head: int = 0  # layers that the head counts as, where layers are spread over chunks

    @property
    def sharing(self) -> int:
        """Ranks of a stage that hold its experts together."""
        return self.expert * self.expert_tensor

    @property
    def model(self) -> int:
        """Ranks that hold one model together; the others are its replicas."""
        return self.tensor * self.context * self.pipeline

    @property
    def chunks(self) -> int:
        """Chunks of consecutive layers of a model; chunk N is on stage N modulo `pipeline`."""
        return self.pipeline * self.virtual

    def layers_of(self, chunk: int, layers: int) -> range:
        """Return the layers of a chunk, of all that the model has: of those that are left over the first chunks have
        one each, and so the last one, which has the head, none, and of the others fewer by what the head counts as.
        """
        count, over = divmod(layers + self.head, self.chunks)
        first = chunk * count + min(chunk, over)
        return range(first, min(first + count + (chunk < over), layers))

    def place_of(self, layer: int, layers: int) -> tuple[int, int]:
        """Return the chunk that has a layer, and the layer's number in it."""
        return next(
            (chunk, layer - own.start)
            for chunk in range(self.chunks)
            if layer in (own := self.layers_of(chunk, layers))
        )

    def bounds(self, layers: int) -> list[int]:
        """Return where chunks begin, of those that have layers, and the number of all layers."""
        own = [self.layers_of(chunk, layers) for chunk in range(self.chunks)]
        return [*(one.start for one in own if one), layers]

    def place(self, rank: int, ranks: int) -> Place:
        """Return what a rank has of the layers and of the tokens of its replica."""
        return Place(self, rank // (ranks // self.pipeline), rank // self.tensor % self.context)

    def replica(self, rank: int, ranks: int) -> int:
        """Number of the replica that a rank belongs to, from 0; all its ranks train the same rows."""
        return rank // (self.tensor * self.context) % (ranks // self.model)

    def holders(self, stage: int, ranks: int, expert_rank: int | None = None) -> Sequence[int]:
        """Return the ranks of a stage, or those of them that have an expert, as megatron-core numbers them."""
        count = ranks // self.pipeline
        own = range(stage * count, (stage + 1) * count)
        if expert_rank is None:
            return own
        return [rank for rank in own if rank // self.expert_tensor % self.expert == expert_rank]

    def is_first(self, rank: int, ranks: int) -> bool:
        """Return whether a rank is the first of its replica, which counts the rows of all."""
        place, first = divmod(rank, self.tensor * self.context)
        return first == 0 and place < ranks // self.model

    def check(self, shape: ModelConfig, directory: Path) -> None:
        """Refuse a model that cannot be divided so.

        Raises:
            ModelError: naming what does not divide what.
        """
        if found := self.problem(shape):
            raise ModelError(f"learner.layout: {found}; the model is {directory}")

    def problem(self, shape: ModelConfig) -> str:
        """Return why a model cannot be divided so; empty if it can."""
        experts = shape.experts
        dense = [(shape.intermediate, "feed-forward channels")] if not experts or experts.dense_first else []
        if experts and experts.shared:
            dense.append((experts.shared, "channels of the shared expert"))
        if shape.delta:
            dense.append((shape.delta.key_heads, "key heads of delta nets"))
            if self.context > 1:
                return f"context = {self.context} divides documents, along which delta nets carry a state; set it to 1"
        for count, what in ((shape.kv_heads, "key-value heads"), *dense):
            if count % self.tensor:
                return f"tensor = {self.tensor} does not divide the model's {count} {what}; use a divisor of {count}"
        if found := self._stages_problem(shape.layers):
            return found
        count = experts.count if experts else 0
        if self.expert > 1 and (not count or count % self.expert):
            hint = f"use a divisor of {count}" if count else "set it to 1"
            return f"expert = {self.expert} does not divide the model's {count} experts; {hint}"
        channels = experts.intermediate if experts else 0
        if self.expert_tensor > 1 and (not channels or channels % self.expert_tensor):
            hint = f"use a divisor of {channels}" if channels else "set it to 1"
            return f"expert_tensor = {self.expert_tensor} does not divide the {channels} channels of an expert; {hint}"
        if (self.tensor - 1) * -(-shape.vocab_size // self.tensor) >= shape.vocab_size:
            return f"tensor = {self.tensor} leaves ranks without any of the model's {shape.vocab_size} tokens; lower it"
        return ""

    def _stages_problem(self, layers: int) -> str:
        if self.virtual > 1 and self.pipeline == 1:
            return f"virtual = {self.virtual} divides the layers of several stages, found pipeline = 1; raise pipeline"
        if self.head and self.pipeline == 1:
            return f"head = {self.head} spreads layers over stages, found pipeline = 1; raise pipeline, or set 0"
        if layers < self.chunks:
            times = f" times virtual = {self.virtual}" if self.virtual > 1 else ""
            return (
                f"pipeline = {self.pipeline}{times} is more than the model's {layers} layers; "
                f"each chunk has one at least: use {layers} at most"
            )
        if not self.layers_of(self.chunks - 1, layers):
            return (
                f"head = {self.head} leaves 0 of the model's {layers} layers to the last of {self.chunks} chunks; "
                "use a smaller number"
            )
        return ""


class Place(NamedTuple):
    """The place of a rank among those that hold one model together: its layers, and its tokens of each document."""

    layout: Layout
    stage: int
    part: int  # among the ranks that share the tokens of a document

    def layers(self, count: int) -> list[range]:
        """Return the own layers of this many."""
        chunks = range(self.stage, self.layout.chunks, self.layout.pipeline)
        return [self.layout.layers_of(chunk, count) for chunk in chunks]

    def tokens(self, length: int) -> list[range]:
        """Return the tokens of a segment of this length; more if GPUs pad it (`asyncrl.training.packing`)."""
        fed, ranks = length - 1, self.layout.context
        if ranks == 1:
            return [range(fed)]
        found = []
        for filled in (fed, fed + -fed % MULTIPLE):
            chunk = -(-filled // (2 * ranks))
            starts = (self.part * chunk, (2 * ranks - 1 - self.part) * chunk)
            found += [range(start, min(start + chunk, fed)) for start in starts if start < fed]
        return found


def layout_of(learner: LearnerSettings) -> Layout:
    """Return how the model is divided over the ranks; one rank holds it whole, or FSDP2 divides it invisibly."""
    return Layout(**msgspec.structs.asdict(learner.layout))
