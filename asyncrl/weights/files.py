"""The weight store `files`: one Hugging Face directory per version in a shared folder, never overwritten."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import xxhash

from asyncrl.crash import crash_point
from asyncrl.data.model_dir import read_json
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.weights.directories import VERSION_NAME, prune_directories, remove_directory, written_aside
from asyncrl.weights.folders import DiskFolder, Folder
from asyncrl.weights.rank_shards import (
    Attempt,
    Describe,
    Filling,
    StoredFiles,
    drop_share,
    take_shares,
    written_share,
)
from asyncrl.weights.tensors import FileRecord, Files, WrittenFile, write_files, write_indexes
from asyncrl.weights.verify import TornVersion, check_version


class FileStore:
    """Versions as directories that inference servers can load directly, each with its manifest."""

    name = "files"

    def __init__(self, root: Path) -> None:
        self._root = root

    def share(self, attempt: Attempt, rank: int) -> AbstractContextManager[Filling]:
        """See `WeightStore.share`."""
        return written_share(self._root / attempt.name, rank)

    def complete(
        self, attempt: Attempt, digest: str, shares: Sequence[StoredFiles], describe: Describe, *, delta: bool = False
    ) -> str:
        """See `WeightStore.complete`. A full version that is there already, as after a replay, is kept if it is whole.

        Raises:
            CheckpointError: a file of a share is missing or cut short, or the disk refused it.
        """
        target = self._root / f"{attempt.name}-{digest[:12]}{'.delta' if delta else ''}"
        if target.exists():
            if not delta and _is_whole(target, digest):
                for share in shares:
                    drop_share(share)
                return str(target)
            remove_directory(target)
        with written_aside(target) as aside:
            take_shares(shares, aside.path)
            crash_point("weights.written")
            describe(DiskFolder(aside.path))
        return str(target)

    def prune(self, keep: Container[str], newest: tuple[int, int]) -> int:
        """Remove the versions that are not among these names of directories; returns how many.

        Args:
            newest: lineage and version of the newest one published. It, or a newer one, may be about to be published.
        """
        return prune_directories(self._root, VERSION_NAME, keep, newest)


def write_model(folder: Folder, tensors: Files, source: Path | None) -> None:
    """Fill a folder with a Hugging Face model and its tokenizer, which no program has to convert.

    Args:
        source: as for `describe_model`.
    """
    describe_model(folder, write_files(folder, tensors), source)


def describe_model(
    folder: Folder, written: Sequence[WrittenFile], source: Path | None, config: bytes | None = None
) -> dict[str, FileRecord]:
    """Make a Hugging Face model of a folder with the tensors in it.

    Args:
        written: the files of all ranks.
        source: model directory whose configuration and tokenizer belong to the tensors, if there is one.
        config: `config.json` in place of the source's.

    Returns:
        The further files, by name.
    """
    beside = {}
    # Every engine version that read the source can read its original config and tokenizer; a config rewritten by
    # transformers may fail.
    for path in source.iterdir() if source is not None else ():
        if path.is_file() and ".safetensors" not in path.name and path.suffix not in (".bin", ".pt", ".pth"):
            content = config if config is not None and path.name == "config.json" else path.read_bytes()
            with folder.file(path.name) as file:
                file.write(content)
            beside[path.name] = FileRecord(len(content), xxhash.xxh3_64_hexdigest(content))
    return beside | write_indexes(folder, written)


def name_stop_tokens(directory: Path) -> None:
    """Add the end of a turn to `generation_config.json` of a model directory, if its files do not name the token.

    Raises:
        TokenizerError: its tokenizer cannot be read.
    """
    if not (directory / "tokenizer.json").is_file():
        return
    tokenizer = TaskTokenizer.load(directory)
    if tokenizer.stop_ids:
        file = directory / "generation_config.json"
        content = (read_json(file) if file.is_file() else {}) | {"eos_token_id": tokenizer.eos_ids}
        file.write_bytes(msgspec.json.format(msgspec.json.encode(content)))


def _is_whole(directory: Path, digest: str) -> bool:
    """Return whether a directory holds a version, bit for bit."""
    try:
        check_version(directory, digest)
    except TornVersion:
        return False
    return True
