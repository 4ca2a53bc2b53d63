"""The weight store `files`: one Hugging Face directory per version in a shared folder, never overwritten."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from asyncrl.training.checkpoint import prune_directories, weights_digest
from topics.weights import TensorInfo, WeightsPublished

if TYPE_CHECKING:
    import torch

    from asyncrl.training.protocol import Trainer  # the warden prunes, and needs no torch for it


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

    def prune(self, keep: Container[str], newest: tuple[int, int]) -> int:
        """Remove the versions that are not among these names of directories; returns how many.

        Args:
            newest: line and version of the newest one said. What is newer may be on its way to be said.
        """
        return prune_directories(self._root, r"line(?P<line>\d+)-v(?P<number>\d+)-", keep, newest)


def _describe(name: str, tensor: torch.Tensor) -> TensorInfo:
    import torch

    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorInfo(name, list(tensor.shape), dtype, xxhash.xxh3_64_hexdigest(content.data))
