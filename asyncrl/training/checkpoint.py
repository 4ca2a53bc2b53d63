"""Checkpoints: one directory each, complete or absent, never overwritten.

A checkpoint is written aside, synced to disk and renamed, so that a directory with a checkpoint's name is a
whole checkpoint. `checkpoint.json` names every file with its size and checksum; reading verifies them.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from asyncrl.crash import crash_point
from asyncrl.errors import UNREADABLE
from asyncrl.files import write_json
from asyncrl.weights.directories import CheckpointError as CheckpointError
from asyncrl.weights.directories import OtherModel as OtherModel
from asyncrl.weights.directories import prune_directories, remove_directory, written_aside
from asyncrl.weights.tensors import FileRecord, at_once, file_record

_RECORD = "checkpoint.json"
_NAME = re.compile(r"step(?P<number>-?\d+)-lineage(?P<lineage>\d+)-")  # the digest follows


def _version() -> str:
    try:
        return importlib.metadata.version("asyncrl")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `checkpoint.json`."""

    lineage: int
    step: int
    digest: str  # of the manifest of the published weights
    batch_sequence: int  # last message of the batch log that the weights contain
    asyncrl: str = msgspec.field(default_factory=_version)  # version of this program
    extra: dict[str, Any] = {}
    files: dict[str, FileRecord] = {}
    xxh3: str = ""  # `_checksum`; "": written by a version that had none

    @property
    def name(self) -> str:
        """Name of the directory."""
        return f"step{self.step:06d}-lineage{self.lineage}-{self.digest[:12]}"


def write_checkpoint(root: Path, checkpoint: Checkpoint, save: Callable[[Path], Mapping[str, FileRecord]]) -> Path:
    """Write one checkpoint under `root`.

    Args:
        root: folder of the checkpoints, made where missing.
        checkpoint: its description; this function fills in `files` and `xxh3`.
        save: writes the files into the directory it is given, and returns their records.

    Returns:
        The checkpoint's directory. An existing one, for example after a replay, is verified and kept, or replaced if it
        is torn.

    Raises:
        CheckpointError: it cannot be written, for example on a full disk; no files remain.
    """
    target = root / checkpoint.name
    if target.exists():
        try:
            read_checkpoint(target)
            return target
        except CheckpointError:
            remove_directory(target)
    with written_aside(target) as aside:
        record = msgspec.structs.replace(checkpoint, files=dict(save(aside.path)))
        fields = msgspec.to_builtins(record)
        write_json(aside.path / _RECORD, fields | {"xxh3": _checksum(fields)})
        crash_point("checkpoint.written")
    return target


def _checksum(fields: Mapping[str, Any]) -> str:
    """Return xxh3_64, hex, of the fields that a record has, but for that of the checksum."""
    known = {name: value for name, value in fields.items() if name != "xxh3"}
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(known, order="deterministic"))


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read and verify a checkpoint.

    Raises:
        CheckpointError: naming the file that is missing, cut short or changed.
    """
    path = directory / _RECORD
    try:
        raw = path.read_bytes()
        checkpoint = msgspec.json.decode(raw, type=Checkpoint)
    except OSError as error:
        raise _incomplete(error) from error
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: {error}; this checkpoint is torn, use another") from error
    if checkpoint.xxh3 not in ("", _checksum(msgspec.json.decode(raw))):
        raise CheckpointError(f"{path}: a value in it was changed; this checkpoint is torn, use another")
    check_files(directory, checkpoint.files)
    if directory.name != checkpoint.name:
        raise CheckpointError(f"{directory}: holds checkpoint {checkpoint.name}; give the directory its name back")
    return checkpoint


def check_files(directory: Path, files: Mapping[str, FileRecord]) -> None:
    """Read and verify files of a checkpoint.

    Raises:
        CheckpointError: naming the file that is missing, cut short or changed.
    """
    try:
        found = at_once(file_record, [directory / name for name in files])
    except OSError as error:
        raise _incomplete(error) from error
    for (name, expected), record in zip(files.items(), found, strict=True):
        if record != expected:
            raise CheckpointError(
                f"{directory / name}: {record.bytes} bytes with xxh3 {record.xxh3}, expected {expected.bytes} with "
                f"{expected.xxh3}; this checkpoint is torn, use another"
            )


def _incomplete(error: OSError) -> CheckpointError:
    return CheckpointError(f"{error.filename}: {error.strerror}; this is no complete checkpoint, use another")


def prune_checkpoints(root: Path, keep: Container[str], newest: tuple[int, int]) -> int:
    """Remove the checkpoints that are not among these names; returns how many.

    Args:
        newest: lineage and step of the newest one published. A newer one may be about to be published.
    """
    return prune_directories(root, _NAME, keep, newest)
