"""The weight store `files`: one Hugging Face directory per version in a shared folder, never overwritten."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from asyncrl.crash import crash_point
from asyncrl.weights.delta import Delta, write_delta
from asyncrl.weights.directories import prune_directories, remove_directory, written_aside
from asyncrl.weights.folders import DiskFolder, Folder
from asyncrl.weights.tensors import Files, digest_of, write_tensors
from asyncrl.weights.verify import MANIFEST, TornVersion, check_version
from topics.weights import WeightsPublished


class FileStore:
    """Versions as directories that inference servers load as they are, each with its manifest."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def publish(self, tensors: Files, source: Path | None, *, lineage: int, version: int) -> WeightsPublished:
        """Write tensors as a version; what is returned may be published once this has returned.

        A version that is there already, as after a replay, is kept, or replaced where it is torn: its name carries its
        digest.

        Args:
            source: model directory whose configuration and tokenizer belong to the tensors, if there is one.

        Raises:
            CheckpointError: the disk refused it; nothing is left behind.
        """
        name = f"lineage{lineage}-v{version:06d}"
        with written_aside(self._root / name) as aside:
            manifest = write_model(DiskFolder(aside.path), tensors, source)
            (aside.path / MANIFEST).write_bytes(manifest)
            digest = digest_of(manifest)
            aside.target = self._root / f"{name}-{digest[:12]}"
            if aside.target.exists() and not _is_whole(aside.target, digest):
                remove_directory(aside.target)
        return WeightsPublished(lineage, version, digest, "files", str(aside.target))

    def publish_delta(self, delta: Delta, *, run: str, base: str, lineage: int, version: int) -> WeightsPublished:
        """See `WeightStore.publish_delta`. One that is there already is written anew."""
        target = self._root / f"lineage{lineage}-v{version:06d}-{delta.digest[:12]}.delta"
        message = WeightsPublished(lineage, version, delta.digest, "files", str(target), base=base)
        if target.exists():
            remove_directory(target)
        with written_aside(target) as aside:
            write_delta(DiskFolder(aside.path), delta, run=run, base=base, key=message.key)
        return message

    def prune(self, keep: Container[str], newest: tuple[int, int]) -> int:
        """Remove the versions that are not among these names of directories; returns how many.

        Args:
            newest: lineage and version of the newest one published. A newer one may be about to be published.
        """
        return prune_directories(self._root, r"lineage(?P<lineage>\d+)-v(?P<number>\d+)-", keep, newest)


def write_model(folder: Folder, tensors: Files, source: Path | None) -> bytes:
    """Fill a folder with a Hugging Face model and its tokenizer, which no program has to convert.

    Args:
        source: as for `FileStore.publish`.

    Returns:
        The manifest of the tensors.
    """
    # The source's own config and tokenizer are readable by every version of every engine that read the source; a
    # config written anew by transformers may not be.
    for path in source.iterdir() if source is not None else ():
        if path.is_file() and ".safetensors" not in path.name and path.suffix not in (".bin", ".pt", ".pth"):
            with folder.file(path.name) as file:
                file.write(path.read_bytes())
    manifest = write_tensors(folder, tensors).manifest
    crash_point("weights.written")
    return manifest


def _is_whole(directory: Path, digest: str) -> bool:
    """Return whether a directory holds a version, bit for bit."""
    try:
        check_version(directory, digest)
    except TornVersion:
        return False
    return True
