"""The reference model of a megatron trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from asyncrl.training.disk_names import stored
from asyncrl.training.host_copy import Source
from asyncrl.training.megatron.policy import MegatronPolicy
from asyncrl.training.reference import NONE, STEM, VERSION, Reference
from asyncrl.training.tensor_files import TensorFiles


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
