"""Weights that reach vLLM past their files, by a backend of vLLM's weight transfer API.

vLLM's workers import this module as their extension, which registers the backend. The tensors of a version are kept
until all have come: a transfer that fails leaves the weights as they are.
"""

from __future__ import annotations

import base64
import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl.weights.shared import unpack_tensors
from asyncrl.weights.transfer import TransferGroup
from asyncrl.weights.transfer_manifest import GroupPlace

BACKEND = "asyncrl"
_JOIN_S = 600.0  # the caller has its own, shorter deadline


@dataclass
class GroupChange(WeightTransferInitInfo):  # type: ignore[misc] # vLLM is not installed here
    """A group that the workers join or leave."""

    join: list[Any] = field(default_factory=list)  # fields of a `GroupPlace`
    leave: str = ""


@dataclass
class Tensors(WeightTransferUpdateInfo):  # type: ignore[misc] # as above
    """Tensors of a version: in memory that this host shares, or sent over a group."""

    packed: str = ""  # base64 of `asyncrl.weights.shared.pack_tensors`
    group: str = ""
    tensors: list[Any] = field(default_factory=list)  # name, dtype and shape of each


class Transfer(WeightTransferEngine[GroupChange, Tensors]):  # type: ignore[misc] # vLLM is not installed here
    """The receiving side in one worker."""

    init_info_cls = GroupChange
    update_info_cls = Tensors

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._groups: dict[str, TransferGroup] = {}
        self._came: list[tuple[str, torch.Tensor]] = []

    def init_transfer_engine(self, init_info: GroupChange) -> None:
        """Join a group, or leave one."""
        if init_info.join:
            place = GroupPlace(*init_info.join)
            rank = 1 + self.parallel_config.rank
            self._groups[place.name] = TransferGroup(place, rank, timeout_s=_JOIN_S)
        self._groups.pop(init_info.leave, None)

    def start_weight_update(self) -> None:
        """Forget tensors of a version that was not completed."""
        self._came = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive some tensors; vLLM's own method asks a CPU for an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Tensors) -> None:
        """Receive some tensors of a version, and keep them."""
        if update_info.packed:
            # The memory is the sender's: it may write something else into it after the answer.
            shared = unpack_tensors(base64.b64decode(update_info.packed))
            self._came += [(name, tensor.to(self.device, copy=True)) for name, tensor in shared]
        else:
            empty = [
                (name, torch.empty(shape, dtype=getattr(torch, dtype), device=self.device))
                for name, dtype, shape in update_info.tensors
            ]
            self._groups[update_info.group].broadcast([tensor for _, tensor in empty])
            self._came += empty
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def finish_weight_update(self) -> None:
        """Load all tensors that came into the model."""
        came, self._came = self._came, []
        initialize_layerwise_reload(self.model)
        self.model.load_weights(came)
        finalize_layerwise_reload(self.model, self.model_config)
        pack_heads(self.model)

    def shutdown(self) -> None:
        """Leave all groups."""
        self._groups.clear()


class Worker:
    """The extension of a worker; importing its module has registered the backend."""

    def load_version(self: Any, path: str) -> None:
        """Load the weights of a directory."""
        self.reload_weights(weights_path=path)
        pack_heads(self.model_runner.get_model())


def pack_heads(model: torch.nn.Module) -> None:
    """Pack output layers for a CPU once more: vLLM leaves one that is tied to the embeddings as it was at the start."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


with contextlib.suppress(ValueError):  # it is registered: a process has several workers
    WeightTransferEngineFactory.register_engine(BACKEND, Transfer)
