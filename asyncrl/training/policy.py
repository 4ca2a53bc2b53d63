"""A transformers model as a function from tokens to log-probabilities, on one device or sharded over many."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import config as partitioning

from asyncrl.data.model_dir import ModelError, expert_count
from asyncrl.data.quantisation import read_quantisation
from asyncrl.training.activation_offload import activations_on_host
from asyncrl.training.attention import Documents
from asyncrl.training.context_parallel.exchange import together
from asyncrl.training.context_parallel.zigzag import part_of
from asyncrl.training.delta_nets import find_kernels
from asyncrl.training.disk_names import DiskNames, stored
from asyncrl.training.document_check import arrangement_of
from asyncrl.training.document_model import DocumentModel, undivided
from asyncrl.training.head import decoder_of, read_head
from asyncrl.training.lora import Lora, add_adapters
from asyncrl.training.masters import Masters
from asyncrl.training.packing import Inputs
from asyncrl.training.routing import Mixture, as_bytes, recorded
from asyncrl.training.sharding import Exchange, Sharded
from asyncrl.training.tensor_files import TensorFiles
from asyncrl.training.transformers_config import read_transformers_config
from asyncrl.training.transformers_parts import AutoModelForCausalLM, logging
from asyncrl.training.vocabulary import CHUNK_ELEMENTS, Kernels, Top, chosen_logprobs, most_probable
from topics.wire import UInt8Array

T = TypeVar("T")

KERNELS = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "asyncrl" / "kernels"
"""Folder of compiled kernels."""

_GRAPHS = 64  # of one function


class Policy(nn.Module):
    """Log-probabilities of chosen tokens, with the vocabulary projected at their positions only."""

    masters: Masters | None = None
    """Exact weights in addition to the computing ones; None if both are equal, or FSDP2 has them."""
    sharded: Sharded | None = None
    """With several ranks."""
    offloads = False
    """Inputs of layers wait for the backward pass in host memory."""
    divides = False
    """Further ranks have parts of the tokens: see `asyncrl.training.context_parallel`."""

    def __init__(self, model: Any, *, compiled: bool = False, sparing: bool = False) -> None:
        super().__init__()
        self.model = model
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.context: int = config.max_position_embeddings
        self.compiled = compiled
        self.names = DiskNames.of(model)
        self.arrangement = arrangement_of(config)
        self.documents = DocumentModel(model, self.arrangement)
        head = read_head(model)
        self._factor = head.factor
        chunk_elements = CHUNK_ELEMENTS if sparing else 0
        self.kernels = Kernels(compiled=compiled, chunk_elements=chunk_elements, bound=head.bound)
        self._routers: dict[int, Any] = {}  # that replay, by the numbers of their layers

    def passes(self, batches: Sequence[T]) -> Iterator[T]:
        """Yield the micro-batches of a gradient: see `Sharded.passes`."""
        return iter(batches) if self.sharded is None else self.sharded.passes(batches)

    @property
    def mixture(self) -> Mixture | None:
        """Return the experts of the model; None without experts."""
        config = self.model.config.get_text_config()
        experts = expert_count(config.to_dict())
        if not experts or not getattr(config, "num_experts_per_tok", 0):
            return None
        layers = enumerate(decoder_of(self.model).layers)
        routed = (number for number, layer in layers if hasattr(getattr(layer, "mlp", None), "experts"))
        return Mixture(config.num_hidden_layers, config.num_experts_per_tok, experts, tuple(routed))

    def replay(self) -> None:
        """From here on tokens go to the experts that their documents name; those of frozen models never do."""
        from asyncrl.training.replay_router import replay_routers  # loads three model families

        self._routers = replay_routers(self.model)
        if not self._routers:
            raise ModelError(
                f"learner.routing: the routers of {type(self.model).__name__} cannot follow recorded experts; "
                'set learner.routing = "own"'
            )

    def taken(self) -> UInt8Array:
        """Return the experts that the tokens of the newest pass went to: see `as_bytes`."""
        assert self.mixture is not None
        layers, experts = self.mixture.layers, self.mixture.experts
        known = {number: router.taken for number, router in self._routers.items()}
        nothing = torch.zeros_like(next(iter(known.values())))  # in a layer without experts
        return as_bytes(torch.stack([known.get(number, nothing) for number in range(layers)], 1), experts)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        documents: Documents,
        wanted: torch.Tensor | Top | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Score one micro-batch.

        Args:
            tokens: [1, T] rows, end to end.
            positions: [N] indices into [T] of the tokens before the scored ones.
            targets: [N] scored tokens.
            temperatures: [N] sampling temperature of each.
            documents: the rows.
            wanted: ids [N, K] whose outcome log-probs are returned too; or the most probable tokens, which are returned
                instead, without gradient.

        Returns:
            [N] log-probs in nats at the given temperatures, and [N] entropies in nats, both float32; with ids also
            [N, K + 1] (`chosen_logprobs`). The most probable tokens, [N, K, 2], alone (`most_probable`).
        """
        if self.divides:
            return self._divided(Inputs(tokens, positions, targets, temperatures, documents), wanted)
        return self.read(self.chosen(tokens, positions, documents), targets, temperatures, wanted)

    def _divided(self, inputs: Inputs, wanted: torch.Tensor | Top | None) -> tuple[torch.Tensor, ...]:
        """Score the tokens of this rank; returns those of all ranks."""
        own, scored, whole, _ = part_of(inputs)
        ids = wanted[scored] if isinstance(wanted, torch.Tensor) else wanted
        chosen = self.chosen(own.tokens, own.positions, own.documents)
        return tuple(together(one, scored, whole) for one in self.read(chosen, own.targets, own.temperatures, ids))

    def read(
        self, chosen: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, wanted: torch.Tensor | Top | None
    ) -> tuple[torch.Tensor, ...]:
        """Apply the head to hidden states, [N, H]; see `forward`."""
        head = self.model.get_output_embeddings()
        if isinstance(wanted, Top):
            return (most_probable(chosen, head, temperatures, self.kernels, wanted),)
        return chosen_logprobs(chosen, head, (targets, temperatures), self.kernels, wanted)

    def chosen(self, tokens: torch.Tensor, positions: torch.Tensor, documents: Documents) -> torch.Tensor:
        """Last hidden states, [N, H], at some positions; see `forward`."""
        if self._routers:
            self._record_routing(documents)
        with activations_on_host(tokens.shape[1]) if self.offloads else nullcontext():
            flat = self.documents.hidden(tokens, documents).flatten(0, 1)
        flat = flat if self._factor == 1.0 else flat * self._factor
        if documents.seen:  # rows share places, whose gradients are added in float32
            exact = flat.float() if flat.itemsize < 4 else flat
            return torch.index_select(exact, 0, positions).to(flat.dtype)
        # Positions differ and rise: as many as there are tokens are all of them.
        return flat if len(positions) == len(flat) else torch.index_select(flat, 0, positions)

    def _record_routing(self, documents: Documents) -> None:
        routing, mixture = documents.routing, self.mixture
        every = None if routing is None or mixture is None else recorded(routing, mixture.layers, mixture.experts)
        for number, router in self._routers.items():  # they keep it for a recomputation in the backward pass
            router.recorded = None if every is None else every[:, number]


@dataclass(frozen=True, slots=True)
class Loading:
    """A way to load a model."""

    device: torch.device  # where this process computes
    dtype: torch.dtype  # of the matrix products; float32 or bfloat16
    compiled: bool
    """Compile each layer at the first pass. Kernels are kept for later starts in `KERNELS`, or in
    `TORCHINDUCTOR_CACHE_DIR`.
    """
    recompute: bool = False  # keep only layer inputs for the backward pass
    offloads: bool = False  # so, and keep these in host memory
    activations: float = (
        1.0  # share of what compiled layers would keep for it; below 1 logits come in small chunks, too
    )
    exact_head: bool = False  # it multiplies in float32
    lora: Lora | None = None  # adapters, which alone are trained then
    trained: bool = False  # it has exact weights too, if it computes with rounded ones
    exchange: Exchange = "auto"
    divides: bool = False  # ranks share the tokens of each row
    halves: bool = True  # exact weights share memory with the rounded ones: see `Masters`


def load_policy(directory: Path, how: Loading, kind: type[Policy] = Policy) -> Policy:
    """Load a Hugging Face model directory, with float32 master weights if it is trained.

    Where torch.distributed has several ranks, parameters are sharded with FSDP2 over all of them.
    """
    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # it would be drawn into logs and reports
    options = {"dtype": torch.float32}
    # The trainer's probabilities must be those of the policy that sampled.
    config = read_transformers_config(directory, attention_dropout=0.0)
    if read_quantisation(directory) is None:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, config=config, local_files_only=True, **options)
    else:
        model = _read_quantised(directory, config, options)
    model.to(how.device)
    policy = kind(model, compiled=how.compiled, sparing=how.activations < 1.0).train()
    policy.kernels.exact, policy.offloads = how.exact_head, how.offloads
    policy.divides = how.divides and _divisible(policy, directory)
    if how.device.type == "cuda" and how.dtype != torch.float32 and (kernels := find_kernels()) is not None:
        policy.documents.use_kernels(kernels)
    if how.lora is not None:
        add_adapters(model, how.lora)
    if how.recompute or how.offloads:
        model.gradient_checkpointing_enable()
    if dist.is_initialized() and dist.get_world_size() > 1:
        policy.sharded = Sharded(policy, decoder_of(policy.model).layers, how.device, how.dtype)
        if how.trained:
            policy.sharded.exchange(how.exchange)
    elif how.dtype != torch.float32 and how.trained:
        policy.masters = Masters(policy.model, halves=how.halves)
    elif how.dtype != torch.float32:
        for parameter in policy.parameters():
            parameter.data = parameter.detach().to(how.dtype)
    if how.compiled:
        from torch._dynamo import config as dynamo  # loads the compiler

        # Of every graph that is compiled from here on; those without a gradient keep nothing anyway.
        partitioning.activation_memory_budget = how.activations
        # Layers of policy, reference, teacher and critic are one function, which few graphs would leave uncompiled.
        dynamo.recompile_limit = _GRAPHS
        with suppress(OSError):
            KERNELS.mkdir(parents=True, exist_ok=True)
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(KERNELS))
        policy.documents.leave_uncompiled()
        for layer in decoder_of(policy.model).layers:
            layer.forward = torch.compile(layer.forward)  # not the hooks around it, which gather its parameters
    return policy


def _divisible(policy: Policy, directory: Path) -> bool:
    """Return True for a model of which ranks can share the tokens.

    Raises:
        ModelError: they cannot.
    """
    if kind := policy.arrangement.undivided:
        raise ModelError(undivided(kind, directory))
    return True


def _read_quantised(directory: Path, config: Any, options: dict[str, Any]) -> Any:
    """Return the model of a directory with quantised weights, which are made whole again."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers would compute with quantised matrices
    kind: Any = AutoModelForCausalLM  # its call has no types
    model = kind.from_config(config, **options)
    with TensorFiles(directory, "model") as files, torch.no_grad():
        names = DiskNames.of(model)
        for name, tensor in stored(model).items():
            tensor.copy_(names.read(files, name, tuple(tensor.shape)))
    return model
