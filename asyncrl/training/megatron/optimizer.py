"""The distributed optimizer of megatron-core over one model: a replica's ranks hold its moments in shares.

Without Transformer Engine the library's checkpoints cannot move moments to another layout (docs/guides/megatron.md).
This module reads and writes moments under Hugging Face names, like the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

from asyncrl.training.adamw import MOMENTS
from asyncrl.training.base_trainer import WEIGHTS
from asyncrl.training.host_copy import Source
from asyncrl.training.lora import peft_name
from asyncrl.training.megatron.experts import Corrections
from asyncrl.training.megatron.mcore_patches import REPLICAS, optimizer_config
from asyncrl.training.megatron.policy import MegatronPolicy
from asyncrl.training.megatron.sharded_params import Once, Place, Reading, is_no_head, is_of_adapter, is_trained
from asyncrl.training.model_optimizer import Stems, Update
from asyncrl.training.tensor_files import TensorFiles

MASTER = "param"  # with the moments: the updated weight


class MegatronOptimizer:
    """See `asyncrl.training.model_optimizer.ModelOptimizer`: of this rank's stage."""

    def __init__(self, policy: MegatronPolicy, *, eps: float, stems: Stems, router_bias_rate: float = 0.0) -> None:
        """
        Args:
            stems: of the files of a checkpoint.
            router_bias_rate: see `Corrections`.
        """
        self._stems = stems
        self.corrections = Corrections(policy.model, router_bias_rate)
        config = policy.chunks[0].config
        self.replicated: list[Any] = [DistributedDataParallel(config, REPLICAS, chunk) for chunk in policy.chunks]
        # The losses are shares of the whole batch, so gradients add up; the library would divide them by the tokens.
        config.finalize_model_grads_func = lambda models, _tokens, **how: finalize_model_grads(models, None, **how)
        self._optimizer = get_megatron_optimizer(  # one, and another for experts
            optimizer_config(eps=eps, dtype=policy.dtype),
            self.replicated,
            config_overrides={},  # all parameters decay, as the torch trainer's
            use_gloo_process_groups=False,
        )
        for group in self._groups():
            group["fused"] = True  # as the torch trainer's: all else of an update takes memory for copies
        self._parts, self._device = policy.parts, policy.device
        # Weights are the rounded masters, and else the masters themselves.
        self._rounded = policy.dtype != torch.float32
        self._adapted = policy.lora is not None
        self._looks_ahead = policy.looks_ahead
        self._ahead = list(self._set_apart(policy))
        self._ahead_norm = 0.0
        if self._rounded and policy.lora is None:
            self._take_masters(policy.directory, WEIGHTS, wanted=bool if policy.has_vocabulary else is_no_head)
        for parameter, exact in policy.drawn.items():
            self._set(parameter, MASTER, exact)

    def forget(self) -> None:
        for chunk in self.replicated:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        self.corrections.forget()

    def norm(self) -> float:
        """Norm of the gradient over all ranks, without that of the layer that predicts ahead, if this one is finite."""
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not self._looks_ahead:
            return norm
        grads = [
            one.grad for one in self._ahead if one.grad is not None and param_is_not_tensor_parallel_duplicate(one)
        ]
        self._ahead_norm = float(get_grad_norm_fp32(grads))
        return norm if math.isfinite(self._ahead_norm) else self._ahead_norm

    def _set_apart(self, policy: MegatronPolicy) -> Iterator[Any]:
        """Take the layer that predicts ahead out of the norm, which the trunk is clipped by; yields its masters."""
        layer = getattr(policy.chunks[-1], "ahead", None)
        for parameter in layer.parameters() if layer is not None else ():
            if (found := self._master(parameter)) is not None:
                found[1].shared = True  # as the library marks what another rank counts
                yield found[1]

    def update(self, update: Update, norm: float) -> None:
        for group in self._groups():
            group["lr"], group["betas"] = update.learning_rate, update.betas
            group["weight_decay"] = update.weight_decay
        apart = {id(one) for one in self._ahead}
        for one in self._optimizer.chained_optimizers:
            if parameters := [held for held in one.get_parameters() if id(held) not in apart]:
                clip_grad_by_total_norm_fp32(parameters, update.max_grad_norm, norm)
        if self._ahead:
            clip_grad_by_total_norm_fp32(self._ahead, update.max_grad_norm, self._ahead_norm)
        self._optimizer.step_with_ready_grads()
        self.corrections.update()
        self.forget()

    def sources(self) -> list[Source]:
        """Tensors for a checkpoint; every rank makes the same list."""
        exact, found = self.exact(), list[Source]()
        for place in self._parts.places:
            tensor = self._parts.gathering(place, exact) if is_trained(place) else self._parts.gathering(place)
            stem, name = self._stems.weights, place.name
            if is_of_adapter(place):
                stem, name = self._stems.adapter, peft_name(name)
            found.append(Source(stem, name, tensor, torch.float32))
        step = self._step()
        if step is None:
            return found
        for kind in MOMENTS:
            for name, tensor in self._parts.trained(self._reading(kind)):
                found.append(Source(self._stems.state, f"{kind}.{name}", tensor, torch.float32))
        return found + [
            Source(self._stems.state, f"step.{place.name}", step, step.dtype)
            for place in filter(is_trained, self._parts.places)
        ]

    def exact(self) -> Reading:
        """Return how trained weights are gathered before they are rounded."""
        return self._reading(MASTER) if self._rounded else Reading()

    def first_other(self, directory: Path) -> str:
        """See `asyncrl.training.adapter_trainer.AdapterOptimizer`."""
        return self._parts.first_other(directory, self._stems.weights)

    def tensors(self) -> list[torch.Tensor]:
        """Weights, and this rank's share of masters and moments."""
        found = [one for chunk in self.replicated for one in chunk.parameters()]
        for one in self._optimizer.chained_optimizers:
            found += [main for group in one.optimizer.param_groups for main in group["params"]]
            found += [state[kind] for state in one.optimizer.state.values() for kind in MOMENTS if kind in state]
        return [one.detach() for one in found]

    def gradients(self) -> list[torch.Tensor]:
        """Return the library's buffers of gradients."""
        buffers = [one for chunk in self.replicated for one in chunk.buffers + chunk.expert_parallel_buffers]
        return [one.grad_data for one in buffers]

    def load(self, directory: Path) -> None:
        with TensorFiles(directory, self._stems.state) as files:
            named = f"step.{next(filter(is_trained, self._parts.places)).name}"
            step = files[named] if named in files.names else None
        for one in self._optimizer.chained_optimizers:
            one.optimizer.state.clear()
            if step is not None:
                with torch.no_grad():
                    for group in one.optimizer.param_groups:
                        group["lr"] = 0.0  # what makes the states is an update
                    one._init_optimizer_states_with_dummy_values()
        if self._rounded and not self._adapted:
            self._take_masters(directory, self._stems.weights)
        else:
            self._parts.read(directory, self._stems.weights)
        if self._adapted and any(directory.glob(f"{self._stems.adapter}*.safetensors")):
            read = self._take_masters if self._rounded else self._parts.read
            read(directory, self._stems.adapter, peft_name("{}"), wanted=is_of_adapter)
        if step is None:
            return
        for kind in MOMENTS:
            for parameter, moment in self._whole(
                directory, self._stems.state, f"{kind}.{{}}", wanted=is_trained
            ).items():
                self._set(parameter, kind, moment)
        for one in self._optimizer.chained_optimizers:
            for state in one.optimizer.state.values():
                state["step"] = step.to(self._device, copy=True)

    def _take_masters(
        self, directory: Path, stem: str, name: str = "{}", *, wanted: Callable[[Place], bool] = bool
    ) -> None:
        for parameter, master in self._whole(directory, stem, name, wanted=wanted).items():
            self._set(parameter, MASTER, master)
            with torch.no_grad():
                parameter.copy_(master)

    def _whole(
        self, directory: Path, stem: str, name: str, *, wanted: Callable[[Place], bool]
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Read tensors of the shapes of this rank's parameters, in float32."""
        whole: dict[torch.Tensor, torch.Tensor] = {}
        self._parts.read(directory, stem, name, partial(_memory, whole), wanted=wanted)
        return whole

    def _owned(self, parameter: torch.Tensor, kind: str) -> tuple[torch.Tensor | None, slice] | None:
        """Return this rank's share of a master or moment, and its place; None without a share."""
        held = self._master(parameter)
        if held is None:
            return None
        one, master = held
        share = one._get_model_param_range_map(parameter)["param"]
        found = master.detach() if kind == MASTER else one.optimizer.state.get(master, {}).get(kind)
        return found, slice(share.start, share.end)

    def _master(self, parameter: torch.Tensor) -> tuple[Any, Any] | None:
        """Return this rank's share of a master and the optimizer that has it; None without a share."""
        for one in self._optimizer.chained_optimizers:
            if parameter in one.model_param_group_index_map:
                group, order = one.model_param_group_index_map[parameter]
                return one, one.optimizer.param_groups[group]["params"][order]
        return None

    def _groups(self) -> list[dict[str, Any]]:
        return [group for one in self._optimizer.chained_optimizers for group in one.optimizer.param_groups]

    def _step(self) -> torch.Tensor | None:
        """Return the number of updates so far, which all parameters share; None before the first."""
        states = (state for one in self._optimizer.chained_optimizers for state in one.optimizer.state.values())
        return next((state["step"] for state in states), None)

    def _reading(self, kind: str) -> Reading:
        """Return how masters or moments are gathered."""
        return Reading(Once(partial(self._placed, kind)), summed=True)

    def _placed(self, kind: str, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of a master or moment in the shape of its parameter, zeros around it."""
        found, owned = torch.zeros_like(parameter, dtype=torch.float32), self._owned(parameter, kind)
        if owned is not None and owned[0] is not None:
            found.view(-1)[owned[1]] = owned[0].view(-1)
        return found

    def _set(self, parameter: torch.Tensor, kind: str, value: torch.Tensor) -> None:
        owned = self._owned(parameter, kind)
        if owned is not None and owned[0] is not None:
            owned[0].view(-1).copy_(value.view(-1)[owned[1]])


def _memory(whole: dict[torch.Tensor, torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor that the parts of what belongs to a parameter are put together in."""
    if parameter not in whole:
        whole[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
    return whole[parameter]
