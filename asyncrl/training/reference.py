"""The reference model: a frozen copy of the policy, from which KL penalties are measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncrl.training.disk_names import stored
from asyncrl.training.host_copy import Source
from asyncrl.training.lora import is_adapter
from asyncrl.training.tensor_files import TensorFiles, placed

STEM, VERSION = "reference", "version"  # of the file in a checkpoint; the tensor in it that is no weight
NONE = -1  # version of a copy that is not there


class Reference:
    """Fills the column `reference`. The copy is made at the first pass that needs it, and is part of checkpoints."""

    def __init__(self, policy: Mapping[str, torch.Tensor], load: Callable[[], Any]) -> None:
        self._policy = policy  # parameters that are copied, by name
        self._load = load  # makes another model of its architecture, with equal placement and sharding
        self._copy: Any = None
        self._parameters: dict[str, torch.Tensor] = {}  # of the copy, sharded as those of the policy
        self._version = torch.tensor(NONE)

    def is_due(self, version: int) -> bool:
        """Return whether the copy has weights that are older than those of this version."""
        return self._copy is not None and int(self._version) < version

    def follow(self, version: int) -> None:
        """Copy the weights of the policy again if that is due; a later copy counts as this version."""
        if self.is_due(version):
            self._take()
        self._version = self._version.clamp(min=version)

    def __call__(self, *inputs: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        self.begin()
        assert self._copy is not None
        found: tuple[torch.Tensor, ...] = self._copy(*inputs, **options)
        return found

    def begin(self) -> None:
        """Make the copy now if it is missing, before a later step changes its origin."""
        if self._copy is None:
            self._copy = self._made()
            self._take()

    def _made(self) -> Any:
        copy = self._load()
        copy.model.requires_grad_(False)
        self._parameters = stored(copy.model)
        return copy

    def _take(self) -> None:
        for name, parameter in self._policy.items():
            self._parameters[name].copy_(parameter.detach())

    def tensors(self) -> list[torch.Tensor]:
        """Weights of the copy, if it exists."""
        return [] if self._copy is None else list(self._parameters.values())

    def sources(self) -> list[Source]:
        """Tensors for a checkpoint; none if no step needed the copy so far."""
        if self._copy is None:
            return []
        found = [Source(STEM, VERSION, self._version, self._version.dtype)]
        for name, tensor in self._parameters.items():
            found += self._copy.names.divided(Source(STEM, name, tensor, tensor.dtype), tuple(tensor.shape))
        return found

    def load(self, directory: Path) -> None:
        """Continue from a checkpoint of the policy. Missing adapters start at zero."""
        self._copy, self._version = None, torch.tensor(NONE)
        if not any(directory.glob(f"{STEM}*.safetensors")):
            return
        with TensorFiles(directory, STEM) as files:
            self._copy = self._made()
            self._version = files[VERSION]
            for name, parameter in self._parameters.items():
                if name in files.names or not is_adapter(name):
                    whole = self._copy.names.read(files, name, tuple(parameter.shape))
                    parameter.copy_(placed(whole, parameter))
