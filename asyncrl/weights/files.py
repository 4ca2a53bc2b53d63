"""The weight store `files`: one Hugging Face directory per version in a shared folder, never overwritten."""

from __future__ import annotations

from collections.abc import Container
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from asyncrl.training.checkpoint import (
    manifest_digest,
    prune_directories,
    remove_directory,
    weights_manifest,
    written_aside,
)
from topics.weights import WeightsPublished

if TYPE_CHECKING:
    from asyncrl.training.protocol import Trainer  # the supervisor prunes, and needs no torch for it

_MANIFEST = "manifest.jsonl"


class FileStore:
    """Versions as directories that inference servers load as they are, each with its manifest."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def publish(self, trainer: Trainer, *, lineage: int, version: int) -> WeightsPublished:
        """Write the trainer's weights as a version; what is returned may be published once this has returned.

        A version that is there already, as after a replay, is kept, or replaced where it is torn: its name carries its
        digest.

        Raises:
            CheckpointError: the disk refused it; nothing is left behind.
        """
        manifest = weights_manifest(trainer.weights())
        digest = manifest_digest(manifest)
        directory = self._root / f"lineage{lineage}-v{version:06d}-{digest[:12]}"
        if directory.exists() and not _holds(directory, manifest):
            remove_directory(directory)
        if not directory.exists():
            with written_aside(directory) as aside:
                trainer.export(aside)
                (aside / _MANIFEST).write_bytes(manifest)
        return WeightsPublished(lineage, version, digest, "files", str(directory))

    def prune(self, keep: Container[str], newest: tuple[int, int]) -> int:
        """Remove the versions that are not among these names of directories; returns how many.

        Args:
            newest: lineage and version of the newest one published. A newer one may be about to be published.
        """
        return prune_directories(self._root, r"lineage(?P<lineage>\d+)-v(?P<number>\d+)-", keep, newest)


def _holds(directory: Path, manifest: bytes) -> bool:
    """Return whether a directory has this manifest, and in its files every tensor of it, bit for bit."""
    from safetensors.torch import load_file

    try:
        files = [load_file(file) for file in directory.glob("*.safetensors")]
        found = weights_manifest(chain.from_iterable(tensors.items() for tensors in files))
        return (directory / _MANIFEST).read_bytes() == manifest and {*manifest.splitlines()} <= {*found.splitlines()}
    except (OSError, SafetensorError):
        return False
