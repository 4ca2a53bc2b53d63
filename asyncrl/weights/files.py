"""The weight store `files`: one Hugging Face directory per version in a shared folder, never overwritten."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from asyncrl.training.checkpoint import weights_digest
from asyncrl.training.protocol import Trainer
from topics.weights import TensorInfo, WeightsPublished

if TYPE_CHECKING:
    import torch


class FileStore:
    """Versions as directories that inference servers load as they are."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def publish(self, trainer: Trainer, *, line: int, version: int) -> WeightsPublished:
        """Write the trainer's weights as a version; what is returned may be said once this has returned.

        A version that is there already, as after a replay, is kept: its name carries its digest.

        Raises:
            CheckpointError: the disk refused it; nothing is left behind.
        """
        tensors = [_describe(name, tensor) for name, tensor in trainer.weights()]
        digest = weights_digest(trainer.weights())
        directory = self._root / f"line{line}-v{version:06d}-{digest[:12]}"
        if not directory.exists():
            trainer.export(directory)
        return WeightsPublished(line, version, digest, "files", str(directory), tensors)

    def prune(self, keep: Iterable[str]) -> None:
        """Remove every version but those at these locations."""
        kept = {Path(location).name for location in keep}
        for directory in self._root.glob("line*"):
            if directory.name not in kept:
                shutil.rmtree(directory, ignore_errors=True)


def _describe(name: str, tensor: torch.Tensor) -> TensorInfo:
    import torch

    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorInfo(name, list(tensor.shape), dtype, xxhash.xxh3_64_hexdigest(content.data))
