"""An estimate of the memory that the fullest rank of a layout needs, from the shape of the model alone."""

from __future__ import annotations

import math
from typing import NamedTuple

from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.megatron.weight_map import Family

CHUNK_ELEMENTS = 1 << 27  # logits held at once, as in asyncrl.training.vocabulary, which loads torch
_EXPERT = ".experts."


class Parameters(NamedTuple):
    """Numbers of parameters of one rank."""

    dense: int
    experts: int


class Training(NamedTuple):
    """A learner, as far as memory goes."""

    ranks: int
    element: int  # bytes of a weight, 4 or 2
    tokens: int  # of a micro-batch, of each rank that shares its documents
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


def parameters_of(family: Family, shape: ModelConfig, layout: Layout) -> list[Parameters]:
    """Parameters of a rank of each stage."""
    stages = [[0, 0] for _ in range(layout.pipeline)]
    for row in family.rows(shape):
        if not row.rule.trained:
            continue
        count, is_expert = math.prod(row.size), _EXPERT in row.name
        if row.rule.split is not None:
            ranks = layout.expert_tensor if is_expert else layout.tensor
            count = -(-row.size[row.rule.split] // ranks) * (count // row.size[row.rule.split])
        if is_expert:
            count = count // layout.expert  # of as many experts on each rank
        chunk, _ = layout.place_of(row.layer, shape.layers)
        stages[chunk % layout.pipeline][is_expert] += count
    if shape.tied and layout.pipeline > 1:  # the last stage has a copy
        stages[-1][0] += -(-shape.vocab_size // layout.tensor) * shape.hidden
    return [Parameters(*stage) for stage in stages]


def rank_memory(family: Family, shape: ModelConfig, layout: Layout, training: Training) -> RankMemory:
    """Estimate what the fullest rank needs for a policy of this shape."""
    ranks, element = training.ranks, training.element
    replicas = ranks // (layout.tensor * layout.pipeline)  # context parallelism divides the moments too
    expert_replicas = max(ranks // (layout.sharing * layout.pipeline), 1)
    kept = 8 if element == 4 else 12  # two moments; and a master
    each = [
        RankMemory(
            (1 + training.copies) * element * sum(of_stage),
            4 * sum(of_stage),
            kept * (-(-of_stage.dense // replicas) + -(-of_stage.experts // expert_replicas)),
            _activations(shape, layout, training),
        )
        for of_stage in parameters_of(family, shape, layout)
    ]
    return max(each, key=sum)


def _activations(shape: ModelConfig, layout: Layout, training: Training) -> int:
    """Bytes of the first stage, which has the most micro-batches in progress, and the logits of a chunk."""
    element, tokens = training.element, training.tokens
    own = -(-tokens // layout.tensor)
    experts = shape.experts
    ffn = experts.intermediate * experts.chosen + experts.shared if experts else shape.intermediate
    # Queries and attention output; keys and values of all ranks that share documents.
    heads = (2 * shape.heads + 2 * shape.kv_heads * layout.context) * shape.head_dim
    of_layer = own * element * (5 * shape.hidden + heads + 4 * ffn)  # inputs of products, norms and the activation
    layers = sum(len(layout.layers_of(chunk, shape.layers)) for chunk in range(0, layout.chunks, layout.pipeline))
    of_pass = own * element * shape.hidden * layers + of_layer if training.recompute else of_layer * layers
    under_way = layout.pipeline + (layout.pipeline - 1) / layout.virtual if layout.virtual > 1 else layout.pipeline
    logits = min(CHUNK_ELEMENTS, tokens * -(-shape.vocab_size // layout.tensor))
    return math.ceil(of_pass * under_way) + 3 * 4 * logits  # logits, probabilities and the slope, in float32
