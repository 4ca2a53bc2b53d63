"""The trainer on megatron-core: the same step as the torch trainer's, in any layout of a model over ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from asyncrl.algorithms.rows import TrainRow
from asyncrl.algorithms.sums import Sums
from asyncrl.algorithms.token_loss import Loss
from asyncrl.algorithms.value_loss import value_loss
from asyncrl.data.quantisation import config_of
from asyncrl.training.adapter_trainer import AdapterTrainer
from asyncrl.training.base_trainer import STATE, WEIGHTS
from asyncrl.training.cpu_offload import Offloader
from asyncrl.training.critic import COLUMNS, STEMS, Critic
from asyncrl.training.disk_names import stored
from asyncrl.training.gradient_attribution import RowPasses
from asyncrl.training.host_copy import HostCopy, Source
from asyncrl.training.megatron.linear_precision import multiply_of
from asyncrl.training.megatron.lora import merged_sources
from asyncrl.training.megatron.mcore_patches import around, join, prepare
from asyncrl.training.megatron.optimizer import MegatronOptimizer
from asyncrl.training.megatron.policy import Loading, MegatronPolicy
from asyncrl.training.megatron.schedule import Schedule
from asyncrl.training.megatron.settings import MegatronSettings
from asyncrl.training.megatron.sharded_params import Reading
from asyncrl.training.model_optimizer import Stems
from asyncrl.training.packing import MicroBatch
from asyncrl.training.passes import Passes
from asyncrl.training.passthrough_weights import PassthroughWeights
from asyncrl.training.reference import NONE, STEM, VERSION, Reference
from asyncrl.training.tensor_files import TensorFiles
from asyncrl.weights.adapters import ADAPTER, ADAPTER_CONFIG
from topics.batches import Objective


class MegatronCritic(Critic):
    """See `Critic`: it is divided over the ranks as the policy, with its own optimiser."""

    def __init__(self, values: MegatronPolicy, settings: MegatronSettings, passes: Passes) -> None:
        """
        Args:
            values: a model whose head gives one number.
        """
        self.scorer, self._passes = values, passes
        self._own = MegatronOptimizer(values, eps=settings.eps, stems=STEMS)
        self._schedule = Schedule(values, self._own, passes, settings.layout)

    def _passed(self, batches: list[list[TrainRow]], clip: float) -> Sums:

        def loss_of(batch: MicroBatch, scores: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, Sums]:
            loss, found = value_loss(scores[0], batch.tokens, clip=clip)
            return loss, {**found, "value_loss": loss.detach().clone()}

        return self._schedule.gradient(batches, COLUMNS, loss_of)


class MegatronReference(Reference):
    """See `Reference`: each rank has its part of the copy."""

    _copy: MegatronPolicy | None

    def __init__(self, policy: MegatronPolicy, load: Callable[[], MegatronPolicy]) -> None:
        held = stored(policy.model).items()
        super().__init__({name: tensor for name, tensor in held if ".ahead." not in name}, load)

    def sources(self) -> list[Source]:
        if self._copy is None:
            return []
        spread = [Source(STEM, name, tensor, torch.float32) for name, tensor in self._copy.parts.spread()]
        return [Source(STEM, VERSION, self._version, self._version.dtype), *spread]

    def load(self, directory: Path) -> None:
        self._copy, self._version = None, torch.tensor(NONE)
        if any(directory.glob(f"{STEM}*.safetensors")):
            copy = self._copy = self._made()
            copy.parts.read(directory, STEM)
            with TensorFiles(directory, STEM) as files:
                self._version = files[VERSION]


class MegatronTrainer(AdapterTrainer):
    """See `Trainer`. Ranks of one replica give `step` the same rows."""

    settings: MegatronSettings
    _own: MegatronOptimizer

    def __init__(self, directory: Path, settings: MegatronSettings | None = None) -> None:
        """Load the model of a Hugging Face directory, which must stay there: versions need its tokenizer.

        Raises:
            ModelError: the family is not known, or the model cannot be divided as the layout says.
        """
        self.settings = settings or MegatronSettings()
        torch.set_num_threads(self.settings.threads)
        lora = self.settings.lora
        self.source, self.beside_state = directory, {} if lora is None else {ADAPTER_CONFIG: lora.config()}
        self.form = self.settings.quantised
        self.config = config_of(directory, self.form)
        self.device = torch.device(self.settings.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._offloader, self._idle, self._frozen = Offloader(self.device), Offloader(self.device), []
        prepare(self.device)
        with self.placed():
            join(self.settings.layout)
            self._open(directory)

    def compile_for(self, objective: Objective) -> None:
        """Compile nothing: layers are compiled at their first pass."""

    def _open(self, directory: Path) -> None:
        self._dtype = torch.float32 if self.settings.dtype == "float32" else torch.bfloat16
        multiply = multiply_of(self.settings.dtype, self.device)
        frozen = Loading(self.settings.layout, self.device, self._dtype, self.settings.compiled, multiply=multiply)
        trained, weight = frozen._replace(recompute=self.settings.recompute), self.settings.mtp_weight
        lora = self.settings.lora
        self._policy = MegatronPolicy(directory, trained._replace(ahead=weight > 0.0, lora=lora))
        self._mixture, self._further = self._policy.mixture, PassthroughWeights(directory, WEIGHTS)
        self.replays, self.records = self.settings.replays, self.settings.records
        self._policy.replays = self.replays or self.records
        self._own = MegatronOptimizer(
            self._policy,
            eps=self.settings.eps,
            stems=Stems(WEIGHTS, STATE, ADAPTER),
            router_bias_rate=self.settings.router_bias_rate,
        )
        self._passes = Passes(
            self.device,
            micro_batch_tokens=self.settings.micro_batch_tokens * self.settings.layout.context,
            group=parallel_state.get_data_parallel_group(),
        )
        self._schedule = Schedule(self._policy, self._own, self._passes, self.settings.layout, weight)
        self._alone = RowPasses(self._passes, self._inputs, self._anew)
        self._reference = MegatronReference(
            self._policy, partial(MegatronPolicy, directory, frozen._replace(lora=lora))
        )
        self.scorers = {"proximal": self._policy, "reference": self._reference}
        self._contexts = {"model": self._policy.context}
        if self.settings.teacher is not None:
            teacher = MegatronPolicy(self.settings.teacher, frozen)
            self.scorers["teacher"], self._contexts["teacher"] = teacher, teacher.context
            self._frozen = list(teacher.model.parameters())
        if self.settings.critic is not None:
            values = MegatronPolicy(self.settings.critic, trained, values=True)
            self._critic = MegatronCritic(values, self.settings, self._passes)
            self.scorers["values"], self._contexts["critic"] = values, values.context
        copied = partial(HostCopy, self.device, rank=dist.get_rank(), ranks=dist.get_world_size())
        whole = {ADAPTER} if self.settings.layout.pipeline == 1 else set[str]()  # the file of an adapter
        self._copies = copied(shares=self.settings.shares, whole=whole), copied(whole=whole)
        self._publish_adapters()

    def _on_device(self) -> AbstractContextManager[object]:
        """Let the library run on this trainer's device."""
        return around(self.device)

    def _gradient(self, batches: list[list[TrainRow]], loss: Loss) -> tuple[Sums, float]:
        return self._schedule.gradient(batches, loss.needs, partial(_loss, loss)), self._own.norm()

    def _weights(self) -> list[Source]:
        if (lora := self.settings.lora) is not None:
            return list(
                merged_sources(self._policy.parts, self._policy.model, self._dtype, self._own.exact(), lora.scale)
            )
        spread = self._policy.parts.spread(Reading(dtype=self._dtype))
        return [Source(WEIGHTS, name, tensor, tensor.dtype) for name, tensor in spread]


def _loss(loss: Loss, batch: MicroBatch, scores: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, Sums]:
    """Return the loss of a micro-batch, and sums."""
    (logprobs, entropy, *outcomes), tokens = scores, batch.tokens
    columns = {**tokens.columns, **dict(zip(("outcomes",), outcomes, strict=False))}
    if loss.uses_entropy:
        columns["entropy"] = entropy
    total, sums = loss(logprobs, tokens._replace(columns=columns))
    figures = {"loss": total.detach().clone(), "entropy": (entropy.detach() * (tokens.weights > 0)).sum()}
    return total, {**sums, **figures}
