"""Checkpoints: one directory each, complete or absent, never overwritten.

A checkpoint is written aside, synced to disk and renamed, so that a directory with a checkpoint's name is a
whole checkpoint. `checkpoint.json` names every file with its size and checksum; reading verifies them.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash
from safetensors import SafetensorError

from asyncrl.crash import crash_point
from asyncrl.errors import AsyncRLError

if TYPE_CHECKING:
    import torch

    from asyncrl.training.protocol import Trainer

_RECORD = "checkpoint.json"
_BLOCK_BYTES = 1 << 22


class CheckpointError(AsyncRLError):
    """A checkpoint that cannot be written, or must not be read."""


def _version() -> str:
    try:
        return importlib.metadata.version("asyncrl")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


class FileRecord(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    bytes: int
    xxh3: str


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `checkpoint.json`."""

    lineage: int
    step: int
    digest: str  # `weights_digest` of the weights
    batch_sequence: int  # last message of the batch log that the weights contain
    asyncrl: str = msgspec.field(default_factory=_version)  # version of this program
    extra: dict[str, Any] = {}
    files: dict[str, FileRecord] = {}

    @property
    def name(self) -> str:
        """Name of the directory."""
        return f"step{self.step:06d}-lineage{self.lineage}-{self.digest[:12]}"


class TensorRecord(msgspec.Struct, frozen=True):
    """One line of a manifest."""

    name: str
    dtype: str  # "float32"
    shape: list[int]
    digest: str  # xxh3_128 of its bytes, hex


def weights_manifest(weights: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Return the manifest of weights: a line of JSON for each tensor, in the order of their names."""
    import torch

    records = []
    for name, tensor in weights:
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest = str(xxhash.xxh3_128_hexdigest(content.data))
        dtype = str(tensor.dtype).removeprefix("torch.")
        records.append(TensorRecord(name, dtype, list(tensor.shape), digest))
    records.sort(key=lambda record: record.name)
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def manifest_digest(manifest: bytes) -> str:
    """Identity of the weights that have this manifest: 32 hexadecimal digits."""
    return str(xxhash.xxh3_128_hexdigest(manifest))


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Identity of weights: that of their manifest."""
    return manifest_digest(weights_manifest(weights))


def write_checkpoint(root: Path, checkpoint: Checkpoint, save: Callable[[Path], None]) -> Path:
    """Write one checkpoint under `root`.

    Args:
        root: folder of the checkpoints, made where missing.
        checkpoint: what it is; `files` is filled in here.
        save: writes the files into the directory it is given.

    Returns:
        The checkpoint's directory. One that is already there, as after a replay, is verified and kept, or replaced
        the place where it is torn.

    Raises:
        CheckpointError: when it cannot be written, for example on a full disk; nothing is left behind.
    """
    target = root / checkpoint.name
    if target.exists():
        try:
            read_checkpoint(target)
            return target
        except CheckpointError:
            remove_directory(target)
    with written_aside(target) as aside:
        save(aside)
        files = {path.name: _file_record(path) for path in sorted(aside.iterdir())}
        record = msgspec.structs.replace(checkpoint, files=files)
        (aside / _RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
        crash_point("checkpoint.written")
    return target


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read and verify a checkpoint.

    Raises:
        CheckpointError: naming the file that is missing, cut short or changed.
    """
    path = directory / _RECORD
    try:
        checkpoint = msgspec.json.decode(path.read_bytes(), type=Checkpoint)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; this is no complete checkpoint, use another") from error
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: {error}; this checkpoint is torn, use another") from error
    for name, expected in checkpoint.files.items():
        try:
            found = _file_record(directory / name)
        except OSError as error:
            raise CheckpointError(
                f"{directory / name}: {error.strerror}; this checkpoint is torn, use another"
            ) from error
        if found != expected:
            raise CheckpointError(
                f"{directory / name}: {found.bytes} bytes with xxh3 {found.xxh3}, expected {expected.bytes} with "
                f"{expected.xxh3}; this checkpoint is torn, use another"
            )
    if directory.name != checkpoint.name:
        raise CheckpointError(f"{directory}: holds checkpoint {checkpoint.name}; give the directory its name back")
    return checkpoint


def load_checkpoint(directory: Path, trainer: Trainer) -> Checkpoint:
    """Read, verify and go on from a checkpoint.

    Raises:
        CheckpointError: naming the file that is missing, cut short or changed, or that belongs to another model.
    """
    checkpoint = read_checkpoint(directory)
    trainer.load(directory)
    return checkpoint


def prune_checkpoints(root: Path, keep: Container[str], newest: tuple[int, int]) -> int:
    """Remove the checkpoints that are not among these names; returns how many.

    Args:
        newest: lineage and step of the newest one published. A newer one may be about to be published.
    """
    return prune_directories(root, r"step(?P<number>-?\d+)-lineage(?P<lineage>\d+)-", keep, newest)


def prune_directories(root: Path, pattern: str, keep: Container[str], newest: tuple[int, int]) -> int:
    """Remove directories of a numbered kind; returns how many.

    Args:
        pattern: of their names, with groups `lineage` and `number`.
        keep: names of those that stay.
        newest: (lineage, number) above which nothing is removed.
    """
    for leftover in root.glob(".*.old"):
        shutil.rmtree(leftover, ignore_errors=True)
    old = []
    for directory in root.iterdir() if root.exists() else ():
        found = re.match(pattern, directory.name)
        if found and directory.name not in keep and (int(found["lineage"]), int(found["number"])) <= newest:
            old.append(directory)
    for directory in old:
        remove_directory(directory)
    return len(old)


def remove_directory(directory: Path) -> None:
    """Remove a directory; a concurrent reader finds all of it or nothing, never a part."""
    aside = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    directory.rename(aside)
    crash_point("prune.inside")
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Give a directory to fill that becomes `target` when all of it is on disk, or vanishes.

    Raises:
        CheckpointError: when `target` exists or the disk refuses a write.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists; it is never overwritten, choose another name or remove it")
    aside = target.parent / f".{target.name}.{os.getpid()}.partial"
    for left in target.parent.glob(f".{target.name}.*.partial"):
        if not Path(f"/proc/{left.name.split('.')[-2]}").exists():  # a killed writer's half
            shutil.rmtree(left, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        for path in [*aside.iterdir(), aside]:
            _sync(path)
        try:
            aside.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            shutil.rmtree(aside, ignore_errors=True)  # another writer of the same content was faster
        _sync(target.parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        # safetensors reports a failed write as an error of its own.
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"{target} could not be written: {_reason(error)}") from error
        raise


def _reason(error: Exception) -> str:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "the disk is full; free some space, older checkpoints are intact" if full else str(error)


def _file_record(path: Path) -> FileRecord:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
        return FileRecord(bytes=file.tell(), xxh3=digest.hexdigest())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
