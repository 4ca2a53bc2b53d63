"""Tensors of a model that no pass reads: layers that predict tokens ahead, for engines that draft; image encoders."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from asyncrl.data.model_dir import tensor_shapes
from asyncrl.engine.embedded.config import read_shape
from asyncrl.training.host_copy import Source
from asyncrl.training.megatron.weight_map import CORRECTION, EMBEDDING, HEAD
from asyncrl.training.tensor_files import TensorFiles

_AGAIN = {"embed_tokens.weight": (EMBEDDING,), "shared_head.head.weight": (HEAD, EMBEDDING)}
"""What such a layer has on disk of the trunk, after `model.layers.N.`; the head may be tied to the embedding."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


_COMPUTED = ".inv_freq"  # of tensors that old checkpoints have, and models compute


def further_tensors(directory: Path, own: Collection[str] | None = None) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a model directory that no pass reads.

    Args:
        own: names of the tensors that passes read; if left out, all but those of layers after the trunk.
    """
    shapes = tensor_shapes(directory)
    if own is not None:
        return {name: one for name, one in shapes.items() if name not in own and not name.endswith(_COMPUTED)}
    layers = read_shape(directory).layers
    numbered = ((name, _LAYER.match(name)) for name in shapes)
    return {name: shapes[name] for name, found in numbered if found and int(found[1]) >= layers}


class PassthroughWeights:
    """The tensors that a trainer does not train, as it publishes them: as they were read.

    Embedding and head, which lie there again, are published as those of the trunk are.
    """

    def __init__(self, directory: Path, stem: str, own: Collection[str] | None = None) -> None:
        self._shapes = further_tensors(directory, own)
        self._stem = stem  # of its files
        self._source = self._files = TensorFiles(directory, stem) if self._shapes else None
        if self._files is not None:
            self._files.__enter__()

    def published(self, own: Sequence[Source], dtype: torch.dtype) -> list[Source]:
        """Return the tensors that are published in addition to the trained ones.

        Args:
            own: names of the trained tensors, at least the trunk.
            dtype: of the trunk.
        """
        trained = {one.name: one for one in own}
        found = []
        for name in self._shapes:
            if name in trained:
                continue
            again = _AGAIN.get(_LAYER.sub("", name), ())
            of_trunk = next((trained[one] for one in again if one in trained), None)
            found.append(self._kept(name, dtype) if of_trunk is None else of_trunk._replace(name=name))
        return found

    def kept(self, own: Sequence[Source]) -> list[Source]:
        """Return the tensors for a checkpoint, if they come from another checkpoint that trained them."""
        if self._files is self._source or self._files is None:
            return []
        trained = {one.name for one in own}
        return [
            self._kept(name, torch.float32)
            for name in self._shapes
            if name in self._files.names and name not in trained
        ]

    def load(self, directory: Path) -> None:
        """Take the tensors of a checkpoint if it has them, otherwise those of the model."""
        if self._source is None:
            return
        files = TensorFiles(directory, self._stem).__enter__()
        if self._shapes.keys() & files.names:
            self._files = files
        else:
            files.__exit__(None, None, None)  # else its bytes would stay on the disk when it is removed
            self._files = self._source

    def _kept(self, name: str, dtype: torch.dtype) -> Source:
        files = self._files if self._files is not None and name in self._files.names else self._source
        assert files is not None
        tensor = _OnDisk(files, name, self._shapes[name])
        return Source(self._stem, name, tensor, torch.float32 if name.endswith(CORRECTION) else dtype)


class _OnDisk:
    """A tensor that is read when it is copied; its file stays open, so it may have been removed since.

    See `asyncrl.training.host_copy.Gathered`: any rank can read it.
    """

    holders: Sequence[int] = ()

    def __init__(self, files: TensorFiles, name: str, shape: tuple[int, ...]) -> None:
        self._files, self._name = files, name
        self.shape = shape

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def whole(self, to: int) -> torch.Tensor | None:
        alone = not dist.is_initialized() or dist.get_rank() == to
        return self._files[self._name] if alone else None
