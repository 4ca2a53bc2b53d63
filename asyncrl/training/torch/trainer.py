"""The trainer on transformers models: AdamW, FSDP2 on GPUs, plain torch on one CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from asyncrl.algorithms.losses import loss_of
from asyncrl.algorithms.penalties import columns_of
from asyncrl.algorithms.rows import TrainRow
from asyncrl.algorithms.sums import Sums
from asyncrl.algorithms.token_loss import Loss
from asyncrl.data.quantisation import config_of
from asyncrl.training.adapter_trainer import AdapterTrainer
from asyncrl.training.base_trainer import STATE, WEIGHTS, on_device
from asyncrl.training.context_parallel.exchange import share_tokens
from asyncrl.training.cpu_offload import Offloader
from asyncrl.training.critic import Critic
from asyncrl.training.disk_names import stored
from asyncrl.training.gradient_attribution import RowPasses
from asyncrl.training.host_copy import HostCopy, Source
from asyncrl.training.lora import with_adapters
from asyncrl.training.model_optimizer import ModelOptimizer, Stems
from asyncrl.training.passes import Passes
from asyncrl.training.passthrough_weights import PassthroughWeights
from asyncrl.training.policy import Loading, Policy, load_policy
from asyncrl.training.reference import Reference
from asyncrl.training.settings import TrainerSettings
from asyncrl.training.sharding import Exchange
from asyncrl.training.torch.first_rows import first_rows
from asyncrl.weights.adapters import ADAPTER, ADAPTER_CONFIG
from topics.batches import Objective


@dataclass(frozen=True, slots=True)
class TorchSettings(TrainerSettings):
    """The settings of a `TorchTrainer`."""

    activations: float = 1.0  # share of what compiled layers would keep for the backward pass
    offload_activations: bool = False  # recompute layers, whose inputs are in host memory meanwhile
    moments: Literal["float32", "bfloat16"] = "float32"  # type of AdamW's between updates
    exchange: Exchange = "auto"  # between ranks
    exact_head: bool = False  # the head multiplies in float32
    context: int = 1  # ranks that share the tokens of each row
    share_prefixes: bool = False  # compute first tokens that rows have in common once


class TorchTrainer(AdapterTrainer):
    """See `Trainer`."""

    settings: TorchSettings
    _own: ModelOptimizer

    def __init__(self, directory: Path, settings: TorchSettings | None = None) -> None:
        """Load the model of a Hugging Face directory, which must stay there: versions need its tokenizer."""
        self.settings = settings or TorchSettings()
        torch.set_num_threads(self.settings.threads)
        self.source, self.form = directory, self.settings.quantised
        self.config = config_of(directory, self.form)
        lora = self.settings.lora
        self.beside_state = {} if lora is None else {ADAPTER_CONFIG: lora.config()}
        self.device = torch.device(self.settings.device)
        if self.device.type == "cuda":
            if self.device.index is not None:
                torch.cuda.set_device(self.device)
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._dtype = torch.float32 if self.settings.dtype == "float32" else torch.bfloat16
        frozen = Loading(
            self.device,
            self._dtype,
            self.settings.compiled,
            activations=self.settings.activations,
            exact_head=self.settings.exact_head,
            divides=self.settings.context > 1,
        )
        others = share_tokens(self.device, self.settings.context)
        own = replace(frozen, lora=lora)
        # torch's own AdamW takes whole masters; on a CPU it is ten times as fast as several passes over halves.
        halves = self.device.type != "cpu" or self.settings.moments != "float32"
        passes = {"recompute": self.settings.recompute, "offloads": self.settings.offload_activations}
        trained = partial(replace, trained=True, halves=halves, exchange=self.settings.exchange, **passes)
        self._policy = load_policy(directory, trained(own))
        read = self._policy.names.of_all(stored(self._policy.model))
        self._mixture, self._further = self._policy.mixture, PassthroughWeights(directory, WEIGHTS, read)
        self.replays, self.records = self.settings.replays, self.settings.records
        if self.replays or self.records:
            self._policy.replay()
        shared = self.settings.share_prefixes and self._policy.arrangement.shares
        budget = self.settings.micro_batch_tokens * self.settings.context
        self._passes = Passes(self.device, micro_batch_tokens=budget, group=others, shared=shared)
        kept: dict[str, Any] = {"eps": self.settings.eps, "moments": getattr(torch, self.settings.moments)}
        self._own = ModelOptimizer(self._policy, directory, stems=Stems(WEIGHTS, STATE, ADAPTER), **kept)
        self._offloader, self._idle, self._frozen = Offloader(self.device), Offloader(self.device), list[torch.Tensor]()
        self._alone = RowPasses(self._passes, self._inputs, self._anew)
        self._reference = Reference(self._own.rounded, partial(load_policy, directory, own))
        self.scorers = {"proximal": self._policy, "reference": self._reference}
        if self.settings.teacher is not None:
            teacher = load_policy(self.settings.teacher, frozen).requires_grad_(False)
            self.scorers["teacher"], self._frozen = teacher, list(teacher.parameters())
        if self.settings.critic is not None:
            self._critic = Critic(self.settings.critic, trained(frozen), self._passes, **kept)
            self.scorers["values"] = self._critic.scorer
        further = {"teacher": self.scorers.get("teacher"), "critic": self._critic and self._critic.scorer}
        self._contexts = {"model": self._policy.context}  # by whose
        self._contexts |= {whose: one.context for whose, one in further.items() if isinstance(one, Policy)}
        ranks = self._passes.processes
        copied = partial(HostCopy, self.device, rank=dist.get_rank() if ranks > 1 else 0, ranks=ranks, whole={ADAPTER})
        self._copies = copied(shares=self.settings.shares), copied()
        self._publish_adapters()

    @on_device
    def compile_for(self, objective: Objective) -> None:
        if not self.settings.compiled:
            return
        loss = loss_of(objective)
        read = dict.fromkeys([*columns_of(objective.penalties), *loss.needs])
        scorers = [self.scorers[name] for name in read if name in self.scorers]
        top = loss.top_k or 1
        for rows in first_rows(self._passes.budget, self._policy.context, loss.needs, top=top):
            for scorer in scorers:
                self._passes.column(scorer, rows)
            self._gradient([rows], loss)
        self._own.compile()
        self._own.forget()

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _gradient(self, batches: list[list[TrainRow]], loss: Loss) -> tuple[Sums, float]:
        """Leave the gradient of the whole batch in the parameters; returns the batch's sums and its norm."""
        even = self._passes.even(batches, loss.needs)
        parts = [self._backward(rows, loss) for rows in self._policy.passes(even)]
        return self._passes.sums(parts), self._own.norm()

    def _backward(self, rows: Sequence[TrainRow], loss: Loss) -> Sums:
        logprobs, entropy, tokens = self._inputs(rows, loss)
        total, sums = loss(logprobs, tokens)
        # FSDP2 averages gradients over ranks; the weights are shares of the whole batch, so they add up.
        torch.autograd.backward(total * self._passes.processes)
        return {**sums, "loss": total.detach(), "entropy": (entropy.detach() * (tokens.weights > 0)).sum()}

    def _weights(self) -> list[Source]:
        """See `BaseTrainer`; in `TorchSettings.dtype`."""
        lora = self.settings.lora
        found: list[Source] = []
        # Adapters are added to exact weights, and the sum is rounded.
        weights = self._own.parameters if lora else self._own.rounded
        for name, tensor, adapter in with_adapters(weights, lora.scale if lora else 0.0):
            dtype = self._dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
            found += self._policy.names.divided(Source(WEIGHTS, name, tensor, dtype, adapter), tuple(tensor.shape))
        return found
