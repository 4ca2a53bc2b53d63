"""The memory that the torch trainer takes on a GPU, estimated from the shape of a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from asyncrl.config.check_learner import has_critic
from asyncrl.config.settings import Config
from asyncrl.data.model_dir import ModelError
from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.engine.errors import EngineError
from asyncrl.training.megatron.families import read_family
from asyncrl.training.megatron.memory import CHUNK_ELEMENTS, RankMemory, parameters_of
from asyncrl.training.megatron.parallel_config import Layout

_LARGE_CHUNK = 1 << 29  # logits held at once, as in asyncrl.training.vocabulary, which loads torch
_POINTWISE = 0.75  # share of the activations that is left where what costs no matrix product is computed again


class Learning(NamedTuple):
    """A learner in bfloat16 with compiled layers, as far as memory goes."""

    ranks: int
    tokens: int  # of a micro-batch
    moments: int  # bytes of both
    activations: float  # share that layers keep
    recompute: bool  # only the inputs of layers are kept
    offloads: bool = False  # these are in host memory
    copies: int = 0  # further models of the policy's shape that are not trained
    once: bool = False  # several ranks exchange weights and gradients once a step


def memory_lines(config: Config, base: Path) -> Iterator[str]:
    """Estimate the memory of a rank that compiles the layers of a dense model of a known family."""
    learner = config.learner
    compiled = learner.device.startswith("cuda") and learner.dtype == "bfloat16" and learner.compile
    if not compiled or learner.lora.rank or not config.model.path:
        return
    try:
        family, shape = read_family(base / config.model.path)
    except (ModelError, EngineError):
        return
    if shape.experts or shape.latent or shape.delta:
        return
    [parameters] = parameters_of(family, shape, Layout())
    learning = Learning(
        ranks=learner.ranks,
        tokens=learner.micro_batch_tokens,
        moments=8 if learner.moments == "float32" else 4,
        activations=learner.activations,
        recompute=learner.recompute or learner.offload_activations,
        offloads=learner.offload_activations,
        copies=int(learner.reference.kl_coef > 0),
        once=learner.exchange == "step",
    )
    found = torch_memory(shape, parameters.dense, learning)
    yield f"memory of a rank of the learner, estimated: {found}"
    if learner.exchange == "auto" and learner.ranks > 1:
        more = sum(torch_memory(shape, parameters.dense, learning._replace(once=True))) - sum(found)
        yield f"{more / 2**30:.1f} GiB more where its GPU has room to exchange once a step (learner.exchange)"
    if learner.teacher.model or has_critic(config):
        yield "a teacher's weights and a critic's weights, gradients and optimiser come on top"


def torch_memory(shape: ModelConfig, parameters: int, learning: Learning) -> RankMemory:
    """Estimate the memory of a rank. One GPU stores masters as 16 bits plus rounded weights; FSDP2 as float32."""
    alone = learning.ranks == 1
    own = -(-parameters // learning.ranks)
    embedding = shape.vocab_size * shape.hidden
    layer = (parameters - embedding) // shape.layers
    gathered = 0 if alone else 2 * (parameters if learning.once else embedding + 2 * layer)
    weights = (2 if alone else 4) * own + 2 * learning.copies * own + gathered
    chunk = min(CHUNK_ELEMENTS if learning.activations < 1.0 else _LARGE_CHUNK, learning.tokens * shape.vocab_size)
    logits = 2 * 2 * chunk + 2 * embedding  # logits and slope; the gradient of the head
    return RankMemory(
        weights=weights,
        gradients=4 * (parameters if learning.once else own),
        optimizer=(learning.moments + (2 if alone else 0)) * own,
        activations=_activations(shape, learning) + logits,
    )


def _activations(shape: ModelConfig, learning: Learning) -> int:
    """Bytes of all layers: inputs of products and norms, gate, up and their product, and those of attention."""
    heads = 3 * (shape.heads + shape.kv_heads) * shape.head_dim
    of_layer = 2 * learning.tokens * (4 * shape.hidden + 3 * shape.intermediate + heads)
    if learning.recompute:
        inputs = 2 * learning.tokens * shape.hidden * (1 if learning.offloads else shape.layers)
        return inputs + of_layer
    kept = _POINTWISE if _POINTWISE <= learning.activations < 1.0 else learning.activations
    return round(kept * of_layer * shape.layers)
