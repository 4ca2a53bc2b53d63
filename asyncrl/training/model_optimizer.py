"""A model with its optimiser: one update, and the parts of a checkpoint."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from asyncrl.training.adamw import MOMENTS, LocalAdamW, NarrowAdamW, local
from asyncrl.training.checkpoint import OtherModel
from asyncrl.training.disk_names import stored
from asyncrl.training.host_copy import Source
from asyncrl.training.lora import is_adapter, peft_name
from asyncrl.training.passthrough_weights import further_tensors
from asyncrl.training.policy import Policy
from asyncrl.training.tensor_files import TensorFiles, placed


class Update(NamedTuple):
    """The settings of one update by AdamW."""

    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float


class Stems(NamedTuple):
    """Stems of the files of a checkpoint."""

    weights: str
    state: str  # of the optimiser
    adapter: str = ""  # empty for a model that never has adapters


class ModelOptimizer:
    """The parameters of a model by their Hugging Face names, and AdamW over those that are trained."""

    def __init__(
        self, policy: Policy, source: Path, *, eps: float, stems: Stems, moments: torch.dtype = torch.float32
    ) -> None:
        """
        Args:
            policy: the model.
            source: directory that it was loaded from, for errors.
            stems: of the files of a checkpoint.
            moments: their type between updates, which compute in float32 (arXiv 2412.19437, section 3.3.2).
        """
        self._source = source
        self._stems = stems
        # FSDP2 may leave a model unsharded after a pass, which then has other parameters for a while.
        self.rounded = stored(policy.model)
        self._masters, self.names = policy.masters, policy.names
        exact = self._masters.parameters if self._masters is not None else {}
        self.parameters: dict[str, torch.Tensor] = {**self.rounded, **exact}
        self._trained = {name: one for name, one in self.parameters.items() if one.requires_grad}
        self._moments = moments
        trained = list(self._trained.values())
        self._optimizer: torch.optim.Optimizer
        if moments != torch.float32 or (self._masters and self._masters.rests):
            self._optimizer = NarrowAdamW(
                trained, eps=eps, moments=moments, masters=self._masters, compiled=policy.compiled
            )
        else:
            self._optimizer = LocalAdamW(trained, lr=0.0, eps=eps, fused=True)

    def norm(self) -> float:
        """Norm of the gradient over all ranks; a parameter that has none has zeros from here on."""
        for parameter in self._trained.values():
            if parameter.grad is None:
                # Momentum moves on even where a batch has no gradient.
                parameter.grad = torch.zeros_like(parameter)
        norm = get_total_norm(self._gradients())
        if isinstance(next(iter(self._trained.values())), DTensor):  # of which each rank has a part
            dist.all_reduce(norm.square_())
            norm.sqrt_()
        return float(norm)

    @torch.no_grad()
    def _gradients(self) -> list[torch.Tensor]:
        """This rank's parts."""
        return [local(parameter.grad) for parameter in self._trained.values() if parameter.grad is not None]

    def update(self, update: Update, norm: float) -> None:
        """Move the weights by the gradient, whose norm this is, and forget it."""
        [group] = self._optimizer.param_groups
        group["lr"], group["betas"] = update.learning_rate, update.betas
        group["weight_decay"] = update.weight_decay
        scale = min(update.max_grad_norm / (norm + 1e-6), 1.0)
        if isinstance(self._optimizer, NarrowAdamW):
            group["scale"] = scale
        elif scale < 1.0:
            gradients = self._gradients()
            total = torch.tensor(norm, device=gradients[0].device)
            torch._foreach_mul_(gradients, update.max_grad_norm / (total + 1e-6))
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._masters is not None:
            self._masters.round()

    def compile(self) -> None:
        """Compile the update, once there is a gradient."""
        if isinstance(self._optimizer, NarrowAdamW):
            self._optimizer.compile()

    def forget(self) -> None:
        """Forget the gradient."""
        self._optimizer.zero_grad()

    def sources(self) -> list[Source]:
        """Tensors for a checkpoint; adapters in separate files with PEFT's names."""
        found: list[Source] = []
        rests = self._masters.rests if self._masters is not None else {}
        for name, one in self.parameters.items():
            if is_adapter(name):
                found.append(Source(self._stems.adapter, self._peft_name(name), one, one.dtype))
                continue
            kept = self.rounded[name] if name in rests else one
            source = Source(self._stems.weights, name, kept, one.dtype, rest=rests.get(name))
            found += self.names.divided(source, tuple(one.shape))
        for name, parameter in self._trained.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                source = Source(self._stems.state, name, value, value.dtype)
                found += self.names.divided(source, tuple(parameter.shape), f"{key}.")
        return found

    def tensors(self) -> list[torch.Tensor]:
        """Weights, and the moments of the optimiser."""
        moments = [state[key] for state in self._optimizer.state.values() for key in MOMENTS if key in state]
        rounded = [] if self._masters is None else [*self.rounded.values(), *self._masters.rests.values()]
        return [*self.parameters.values(), *rounded, *moments]

    def gradients(self) -> list[torch.Tensor]:
        """Return none: an update forgets them."""
        return []

    def load(self, directory: Path) -> None:
        """Continue from the files of a checkpoint, whose tensors are read one at a time.

        New adapters start on the weights of a checkpoint without adapters.

        Raises:
            OtherModel: it belongs to another model.
            CheckpointError: a tensor is missing.
            OSError, SafetensorError: it cannot be read.
        """
        with TensorFiles(directory, self._stems.weights) as weights, TensorFiles(directory, self._stems.state) as state:
            self._load({name: one for name, one in self.parameters.items() if not is_adapter(name)}, weights)
            adapters = {self._peft_name(name): one for name, one in self.parameters.items() if is_adapter(name)}
            stem = self._stems.adapter
            if stem and any(directory.glob(f"{stem}*.safetensors")):
                with TensorFiles(directory, stem) as files:
                    self._load(adapters, files)
            self._load_state(state)

    def _peft_name(self, name: str) -> str:
        """The name of an adapter's parameter in PEFT's files, for the module as it is named on disk."""
        module, _, end = name.rpartition(".")
        on_disk = next(iter(self.names.parts(f"{module}.weight", ())))
        return peft_name(f"{on_disk.removesuffix('weight')}{end}")

    def first_other(self, directory: Path) -> str:
        """Return the name of a frozen weight that differs from a model's; empty if there are none."""
        with TensorFiles(directory, self._stems.weights) as files:
            for name, one in self.parameters.items():
                if not one.requires_grad:
                    wanted = placed(self.names.read(files, name, tuple(one.shape)), one).to(one.dtype)
                    if not torch.equal(local(wanted), local(one)):
                        return name
        return ""

    def _load(self, parameters: dict[str, torch.Tensor], files: TensorFiles) -> None:
        apart = further_tensors(self._source, self.names.of_all(self.rounded))
        found = {name: files.shape(name) for name in files.names if name not in apart}
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        expected = dict(part for name, shape in shapes.items() for part in self.names.shapes(name, shape).items())
        if found != expected:
            name = min(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            raise OtherModel(
                f"{files.directory}: {name} has shape {found.get(name)}, the model in {self._source} "
                f"has {expected.get(name)}; a checkpoint continues only the model it was made from"
            )
        for name, parameter in parameters.items():
            whole = self._masters.exact(parameter) if self._masters is not None else nullcontext()
            with torch.no_grad(), whole:
                parameter.copy_(placed(self.names.read(files, name, shapes[name]), parameter))

    def _load_state(self, state: TensorFiles) -> None:
        self._optimizer.state.clear()
        for name, parameter in self._trained.items():
            shape = tuple(parameter.shape)
            step = f"step.{next(iter(self.names.parts(name, shape)))}"
            if step in state.names:
                kept = {key: placed(self.names.read(state, name, shape, f"{key}."), parameter) for key in MOMENTS}
                device = "cpu" if isinstance(self._optimizer, NarrowAdamW) else parameter.device
                own = {key: moment.to(self._moments) for key, moment in kept.items()}
                self._optimizer.state[parameter] = {"step": state[step].to(device), **own}
