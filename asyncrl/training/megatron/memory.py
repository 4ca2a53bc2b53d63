"""An estimate of the memory that the fullest rank of a layout needs, from the shape of the model alone."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.training.megatron.layout import Layout

CHUNK_ELEMENTS = 1 << 27  # logits held at once, as in asyncrl.training.vocabulary, which loads torch
_WHOLE = re.compile(r"norm\.weight|mlp\.gate\.weight")  # on each rank of a tensor-parallel group
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_EXPERT = ".experts."


class Parameters(NamedTuple):
    """Numbers of parameters of one rank."""

    dense: int
    experts: int


class Training(NamedTuple):
    """A learner, as far as memory goes."""

    ranks: int
    element: int  # bytes of a weight, 4 or 2
    tokens: int  # of a micro-batch
    recompute: bool  # only the inputs of layers are kept
    copies: int = 0  # further models of the policy's shape that are not trained


class RankMemory(NamedTuple):
    """Bytes of the fullest rank."""

    weights: int  # with those of teacher and reference
    gradients: int
    optimizer: int  # moments, and in bfloat16 masters
    activations: int

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in self._asdict().items())
        return f"{sum(self) / 2**30:.2f} GiB ({parts})"


def parameters_of(shape: ModelConfig, layout: Layout) -> list[Parameters]:
    """Parameters of a rank of each stage."""
    stages = [[0, 0] for _ in range(layout.pipeline)]
    per_chunk = shape.layers // layout.chunks
    for name, size in shape.tensors().items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        chunk = int(layer[1]) // per_chunk if layer else 0 if name == _VOCABULARY[0] else layout.chunks - 1
        count = math.prod(size)
        if name in _VOCABULARY:
            count = -(-size[0] // layout.tensor) * size[1]
        elif _EXPERT in name:
            count = count // layout.expert  # of as many experts on each rank
        elif not _WHOLE.search(name):
            count = count // layout.tensor
        stages[chunk % layout.pipeline][_EXPERT in name] += count
    if shape.tied and layout.pipeline > 1:  # the last stage has a copy
        stages[-1][0] += -(-shape.vocab_size // layout.tensor) * shape.hidden
    return [Parameters(*stage) for stage in stages]


def rank_memory(shape: ModelConfig, layout: Layout, training: Training) -> RankMemory:
    """Estimate what the fullest rank needs for a policy of this shape."""
    ranks, element = training.ranks, training.element
    replicas = ranks // (layout.tensor * layout.pipeline)  # context parallelism divides the moments too
    expert_replicas = max(ranks // (layout.expert * layout.pipeline), 1)
    kept = 8 if element == 4 else 12  # two moments; and a master
    each = [
        RankMemory(
            (1 + training.copies) * element * sum(of_stage),
            4 * sum(of_stage),
            kept * (-(-of_stage.dense // replicas) + -(-of_stage.experts // expert_replicas)),
            _activations(shape, layout, training),
        )
        for of_stage in parameters_of(shape, layout)
    ]
    return max(each, key=sum)


def _activations(shape: ModelConfig, layout: Layout, training: Training) -> int:
    """Bytes that the first stage keeps, which has the most micro-batches under way, and the logits of a chunk."""
    element, tokens = training.element, training.tokens
    own = -(-tokens // (layout.context * layout.tensor))
    ffn = shape.experts.intermediate * shape.experts.chosen if shape.experts else shape.intermediate
    heads = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim  # queries, keys, values, and what was attended
    of_layer = own * element * (5 * shape.hidden + heads + 4 * ffn)  # inputs of products, norms and the activation
    layers = shape.layers // layout.pipeline
    of_pass = own * element * shape.hidden * layers + of_layer if training.recompute else of_layer * layers
    under_way = layout.pipeline + (layout.pipeline - 1) / layout.virtual if layout.virtual > 1 else layout.pipeline
    logits = min(CHUNK_ELEMENTS, tokens * -(-shape.vocab_size // layout.tensor))
    return math.ceil(of_pass * under_way) + 3 * 4 * logits  # logits, probabilities and the slope, in float32
