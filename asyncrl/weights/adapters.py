"""Adapter versions: files that name the base model of an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from asyncrl.errors import UNREADABLE
from asyncrl.weights.directories import CheckpointError, OtherModel
from asyncrl.weights.folders import Folder
from asyncrl.weights.tensors import TensorRecord, digest_of, file_line, read_manifest

ADAPTER = "adapter_model"
"""Stem of PEFT's files."""

ADAPTER_CONFIG = "adapter_config.json"
"""File that PEFT reads with the tensors."""

BASE_MODEL = "base_model.json"
"""File that names the model which an adapter is added to; PEFT passes over it."""

PEFT_PREFIX = "base_model.model."
"""Beginning of PEFT's names of tensors."""


class BaseModel(msgspec.Struct, frozen=True):
    """The model that an adapter is added to, and the form of the sums."""

    digest: str  # xxh3_128 of the manifest of its tensors, hex
    dtype: str  # of the tensors of the sum: "bfloat16"
    kept: list[str] = []  # names of those that keep the type they have in the model's files


class AdapterShape(msgspec.Struct, frozen=True):
    """The part of `ADAPTER_CONFIG` that counts for the sum."""

    r: int
    lora_alpha: float
    target_modules: list[str]

    def __post_init__(self) -> None:
        self.target_modules.sort()  # their order says nothing

    def __str__(self) -> str:
        return f"rank {self.r} and alpha {self.lora_alpha:g} on {', '.join(self.target_modules)}"


class PublishedAdapter(NamedTuple):
    """The files by which the tensors of a version are an adapter."""

    base: BaseModel
    config: bytes  # content of `ADAPTER_CONFIG`

    @property
    def files(self) -> Mapping[str, bytes]:
        """Return the further files of a version, by name."""
        return {ADAPTER_CONFIG: self.config, BASE_MODEL: msgspec.json.format(msgspec.json.encode(self.base))}

    @property
    def records(self) -> list[TensorRecord]:
        """Return their lines of the manifest: the same tensors, added to another model or otherwise, are others."""
        return [file_line(name, content) for name, content in self.files.items()]

    def describe(self, folder: Folder) -> None:
        """Write them."""
        for name, content in self.files.items():
            with folder.file(name) as file:
                file.write(content)


def is_adapter(directory: Path) -> bool:
    """Return whether a directory of a version holds an adapter."""
    return (directory / BASE_MODEL).is_file()


def read_base(directory: Path) -> BaseModel:
    """Return what the adapter in a directory is added to.

    Raises:
        OSError, or one of `UNREADABLE`: there is none.
    """
    return msgspec.json.decode((directory / BASE_MODEL).read_bytes(), type=BaseModel)


def read_shape(directory: Path) -> AdapterShape:
    """Return the shape of the adapter in a directory.

    Raises:
        OSError, or one of `UNREADABLE`: there is none.
    """
    return msgspec.json.decode((directory / ADAPTER_CONFIG).read_bytes(), type=AdapterShape)


def check_shape(directory: Path, config: bytes | None) -> None:
    """Refuse a checkpoint whose adapters would be lost or scaled differently; without adapters in it, new ones start.

    Args:
        directory: of the checkpoint.
        config: content of `ADAPTER_CONFIG` of the continuing run; None without adapters.

    Raises:
        OtherModel: its adapters have another shape.
        CheckpointError: what says so cannot be read.
    """
    if not (directory / ADAPTER_CONFIG).exists():
        return
    try:
        found = read_shape(directory)
    except (OSError, *UNREADABLE) as error:
        raise CheckpointError(f"{directory / ADAPTER_CONFIG}: {error}; this checkpoint is torn, use another") from error
    own = None if config is None else msgspec.json.decode(config, type=AdapterShape)
    if own != found:
        raise OtherModel(
            f"{directory}: its adapters have {found}, the learner's have {own or 'rank 0'}; keep learner.lora as it "
            "was, or begin a run with the model that this one exported (model.path)"
        )


def digest_of_model(directory: Path) -> str:
    """Return the identity of a model: that of its tensors, which are all read.

    Raises:
        OSError, ValueError: a file cannot be read, or is no safetensors file.
    """
    return digest_of(read_manifest(sorted(directory.glob("*.safetensors"))))
