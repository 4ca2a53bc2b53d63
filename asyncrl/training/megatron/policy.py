"""A model of megatron-core as a function from tokens to log-probabilities, for all ranks of a replica at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import nn

from asyncrl.data.model_dir import ModelError
from asyncrl.training.attention import Documents
from asyncrl.training.lora import Lora
from asyncrl.training.megatron.context import Share, of_all_ranks, share_of
from asyncrl.training.megatron.delta_net import use_kernels
from asyncrl.training.megatron.experts import ExpertLayer
from asyncrl.training.megatron.families import ahead_problem, read_family
from asyncrl.training.megatron.layers import Layer
from asyncrl.training.megatron.linear_precision import Multiply
from asyncrl.training.megatron.lora import add_adapters, draw_adapters
from asyncrl.training.megatron.mcore_patches import multiply_by
from asyncrl.training.megatron.modules import build
from asyncrl.training.megatron.parallel_config import Layout, Place
from asyncrl.training.megatron.sharded_params import Parts, is_no_head
from asyncrl.training.megatron.vocabulary import kernels_of
from asyncrl.training.packing import Inputs
from asyncrl.training.routing import Mixture, as_bytes, recorded
from asyncrl.training.vocabulary import Top, chosen_logprobs, most_probable
from topics.wire import UInt8Array


class _Head(NamedTuple):
    weight: torch.Tensor
    bias: None = None


class Loading(NamedTuple):
    """A way to load a model."""

    layout: Layout
    device: torch.device  # where this process computes
    dtype: torch.dtype = torch.float32
    compiled: bool = False  # each layer, at its first pass
    recompute: bool = False  # keep only layer inputs for the backward pass
    ahead: bool = False  # with the layer that predicts the token after the next one
    multiply: Multiply | None = None  # of its linear layers; None: in the type of their weights
    lora: Lora | None = None  # adapters, which alone are trained


class MegatronPolicy:
    """The stage of this rank, and the exchange with the other stages. See `asyncrl.training.policy.Policy`."""

    def __init__(self, directory: Path, how: Loading, *, values: bool = False) -> None:
        """Load the part of this rank out of a Hugging Face model directory.

        Args:
            values: for a critic, whose head gives the value of the state before each token (`critic.ValueModel`).

        Raises:
            ModelError: the family is not known, or the model cannot be divided so.
        """
        layout, device, dtype = how.layout, how.device, how.dtype
        family, shape = read_family(directory)
        layout.check(shape, directory)
        if values:
            shape = msgspec.structs.replace(shape, tied=False)
        elif how.ahead:
            if problem := ahead_problem(directory, shape):
                raise ModelError(f"{directory}: {problem}; set learner.mtp_weight = 0")
            shape = msgspec.structs.replace(shape, ahead=True)
        self.directory, self.has_vocabulary = directory, not values
        self._layout, self.device, self.dtype = layout, device, dtype
        self.vocab_size, self.context = shape.vocab_size, shape.max_positions
        self._hidden_size, self._tied, self.looks_ahead = shape.hidden, shape.tied, shape.ahead
        self.chunks: list[Any] = build(family, shape, layout, dtype=dtype, recompute=how.recompute, values=values)
        self.model = nn.ModuleList(self.chunks)
        self.lora = how.lora
        if how.lora is not None:
            add_adapters(self.chunks, family, shape, layout, how.lora)
        if how.multiply is not None:
            multiply_by(how.multiply, self.model)
        if device.type == "cuda":
            self.model.to(device)
            if shape.delta and dtype != torch.float32:
                use_kernels(self.model, directory)
        self.parts = Parts(self.chunks, family, shape, layout, values=values, lora=how.lora)
        self.parts.read(directory, "model", wanted=is_no_head if values else bool)
        self.drawn = {} if how.lora is None else draw_adapters(self.parts)
        if how.compiled:
            for layer in (layer for layer in self.model.modules() if isinstance(layer, Layer)):
                layer.compile()
        experts = shape.experts
        stage, part = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_context_parallel_rank()
        place = Place(layout, stage, part)
        self.mixture = None
        if experts:
            held = (layer for layers in place.layers(shape.layers) for layer in layers)
            routed = tuple(layer for layer in held if layer >= experts.dense_first)
            self.mixture = Mixture(shape.layers, experts.chosen, experts.count, routed, place.tokens)
        self.replays = False  # tokens go to the experts that their documents name
        self._last = parallel_state.is_pipeline_last_stage()
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        rows = -(-shape.vocab_size // layout.tensor)
        self._start = rows * parallel_state.get_tensor_model_parallel_rank()
        own = range(self._start, min(self._start + rows, shape.vocab_size))
        self._kernels = kernels_of(own, shape.vocab_size, compiled=how.compiled)

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        documents: Documents,
        wanted: torch.Tensor | Top | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Score one micro-batch, without gradient: see `Policy.forward`. Every rank of the replica has the result."""
        inputs = Inputs(tokens, positions, targets, temperatures, documents)
        with torch.no_grad():
            return self._over_stages(inputs, wanted)

    def _over_stages(self, inputs: Inputs, wanted: torch.Tensor | Top | None) -> tuple[torch.Tensor, ...]:
        share = self.share(inputs)
        self._newest = share, inputs.tokens.shape[1]
        if self._layout.pipeline == 1:
            return self.scored(self.hidden(self.chunks[0], share), share, wanted)
        length = share.tokens.shape[1] // self._layout.tensor
        for chunk in self.chunks:
            if not chunk.pre_process:
                received = torch.empty(length, 1, self._hidden_size, dtype=self.dtype, device=self.device)
                dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank(), self._stages)
                chunk.set_input_tensor(received)
            hidden = self.hidden(chunk, share)
            if not chunk.post_process:
                dist.send(hidden.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank(), self._stages)
        if self._last:
            found = self.scored(hidden, share, wanted)
        else:
            found = tuple(torch.empty(size, device=self.device) for size in self._sizes(len(inputs.targets), wanted))
        for one in found:
            dist.broadcast(one, parallel_state.get_pipeline_model_parallel_last_rank(), self._stages)
        return found

    def taken(self) -> UInt8Array:
        """Return the experts that the tokens of the newest micro-batch went to, on every rank: see `as_bytes`."""
        assert self.mixture is not None
        (share, count), (layers, chosen, experts, *_) = self._newest, self.mixture
        size = (share.tokens.shape[1] // self._layout.tensor, layers, chosen)
        found = torch.zeros(size, dtype=torch.int32, device=self.device)
        for layer in (layer for chunk in self.chunks for layer in chunk.decoder.layers):
            if isinstance(layer, ExpertLayer) and layer.taken is not None:
                found[:, layer.layer_number - 1] = layer.taken.int()
        if self._layout.tensor > 1:
            every = [torch.empty_like(found) for _ in range(self._layout.tensor)]
            dist.all_gather(every, found, group=parallel_state.get_tensor_model_parallel_group())
            found = torch.cat(every)
        if self._layout.pipeline > 1:
            dist.all_reduce(found, group=self._stages)
        if share.sources is not None:
            whole = found.new_zeros(count, *size[1:])
            whole[share.sources[share.sources >= 0]] = found[share.sources >= 0]
            dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
            found = whole
        return as_bytes(found[:count], experts)

    def _sizes(self, count: int, wanted: torch.Tensor | Top | None) -> list[tuple[int, ...]]:
        """Sizes of the scores of this many tokens."""
        if isinstance(wanted, Top):
            return [(count, wanted.number, 2)]
        if wanted is None:
            return [(count,), (count,)]
        return [(count,), (count,), (count, min(wanted.shape[1] + 1, self.vocab_size))]

    def share(self, inputs: Inputs) -> Share:
        """Return what this rank has of a micro-batch."""
        documents = inputs.documents if self.replays else inputs.documents._replace(routing=None)
        share = share_of(inputs, documents, self._layout)
        routing = share.packed.documents.routing
        if routing is not None and self.mixture is not None:
            own = routing.chunk(self._layout.tensor)[parallel_state.get_tensor_model_parallel_rank()]
            share.packed.recorded = recorded(own, self.mixture.layers, self.mixture.experts)
        return share

    def count(self, share: Share, weights: torch.Tensor) -> None:
        """Let experts count the tokens whose next one is trained: in each layout they are the same.

        Args:
            weights: [N] of the scored tokens of all ranks in the loss.
        """
        own = weights if share.scored is None else weights[share.scored]
        counted = torch.zeros(share.tokens.shape[1], dtype=torch.int64, device=self.device)
        counted[share.positions] = (own > 0).long()
        rank = parallel_state.get_tensor_model_parallel_rank()
        share.packed.counted = counted.chunk(self._layout.tensor)[rank].unsqueeze(1)

    def hidden(self, model: Any, share: Share) -> torch.Tensor:
        """Return the hidden states after a chunk of layers.

        Args:
            model: the chunk, or what wraps it.

        Returns:
            [T / tensor, 1, H], T the tokens of the share.
        """
        found: torch.Tensor = model(share.tokens, None, None, packed_seq_params=share.packed)
        return found

    def scored(
        self, hidden: torch.Tensor, share: Share, wanted: torch.Tensor | Top | None = None, *, learns: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Score all tokens from the hidden states of the last stage: see `Policy.forward`; or return their values.

        Args:
            learns: whether the head has a gradient.
        """
        if self._layout.tensor > 1:
            # The gradient of logits is summed over the ranks, each of which has other tokens to score by.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=self.has_vocabulary)
        chosen = torch.index_select(hidden.squeeze(1), 0, share.positions)
        if not self.has_vocabulary:
            own = self._valued(chosen)
        else:
            weight = self.head_weight()
            own = self._scored(chosen, share, wanted, _Head(weight if learns else weight.detach()))
        return tuple(of_all_ranks(one, share) for one in own)

    def _valued(self, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = self.chunks[-1].output_layer(chosen).float().squeeze(-1)
        return values, values.detach()

    def head_weight(self) -> torch.Tensor:
        """Return this rank's rows of the head, on the last stage."""
        last = self.chunks[-1]
        tied = self._tied and last.pre_process  # several stages have a copy of the embedding in the last one
        weight: torch.Tensor = last.embedding.word_embeddings.weight if tied else last.output_layer.weight
        return weight

    def _scored(
        self, chosen: torch.Tensor, share: Share, wanted: torch.Tensor | Top | None, head: _Head
    ) -> tuple[torch.Tensor, ...]:
        if isinstance(wanted, Top):
            return (most_probable(chosen, head, share.temperatures, self._kernels, wanted),)
        ids = wanted if wanted is None or share.scored is None else wanted[share.scored]
        columns = share.targets - self._start, share.temperatures
        return chosen_logprobs(chosen, head, columns, self._kernels, None if ids is None else ids - self._start)
