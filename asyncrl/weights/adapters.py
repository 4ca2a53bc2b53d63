"""Versions that are adapters: the files beside their tensors, by which an engine knows what they are added to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from asyncrl.weights.folders import Folder
from asyncrl.weights.tensors import TensorRecord, digest_of, file_line, read_manifest

ADAPTER = "adapter_model"
"""Stem of PEFT's files."""

ADAPTER_CONFIG = "adapter_config.json"
"""File that PEFT reads beside them."""

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


class PublishedAdapter(NamedTuple):
    """The files by which the tensors of a version are an adapter."""

    base: BaseModel
    config: bytes  # content of `ADAPTER_CONFIG`

    @property
    def files(self) -> Mapping[str, bytes]:
        """Return the files beside the tensors, by name."""
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
        OSError, msgspec.MsgspecError: there is none.
    """
    return msgspec.json.decode((directory / BASE_MODEL).read_bytes(), type=BaseModel)


def digest_of_model(directory: Path) -> str:
    """Return the identity of a model: that of its tensors, which are all read.

    Raises:
        OSError, ValueError: a file cannot be read, or is no safetensors file.
    """
    return digest_of(read_manifest(sorted(directory.glob("*.safetensors"))))
