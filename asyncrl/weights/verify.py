"""Check of the files of a version against its identity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from asyncrl.errors import UNREADABLE, AsyncRLError
from asyncrl.weights.folders import Folder
from asyncrl.weights.tensors import (
    FILE,
    FileRecord,
    TensorRecord,
    digest_of,
    file_line,
    file_record,
    manifest_of_records,
    read_manifest,
)

MANIFEST = "manifest.jsonl"
BESIDE = "files.json"
"""File with the records of configuration, tokenizer and index, which are no part of the digest."""


class TornVersion(AsyncRLError):
    """A version whose bytes are not all there, or not those that were published."""


def write_manifest(folder: Folder, manifest: bytes, beside: Mapping[str, FileRecord]) -> None:
    """Complete a version with its checksums.

    Args:
        beside: the files beside the tensors, which the manifest does not name.
    """
    files = ({BESIDE: msgspec.json.encode(beside)} if beside else {}) | {MANIFEST: manifest}
    for name, content in files.items():
        with folder.file(name) as file:
            file.write(content)


def check_version(directory: Path, digest: str) -> None:
    """Check all tensors of a version against its digest, and the further files against their checksums.

    Args:
        directory: of the version.
        digest: "": that of the manifest there.

    Raises:
        TornVersion: they are others, or cannot be read.
    """
    try:
        manifest = (directory / MANIFEST).read_bytes()
        found = read_manifest(sorted(directory.glob("*.safetensors"))) + _files_in(manifest, directory)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise TornVersion(f"{directory.name}: {error}") from error
    if digest and digest_of(manifest) != digest:
        raise TornVersion(f"{directory.name}: its manifest has digest {digest_of(manifest)}, expected {digest}")
    wrong = sorted({*manifest.splitlines()} ^ {*found.splitlines()})
    if wrong:
        raise TornVersion(f"{directory.name}: {len(wrong)} tensors differ from its manifest, one of them {wrong[0]!r}")
    _check_beside(directory)


def _check_beside(directory: Path) -> None:
    if not (directory / BESIDE).exists():
        return  # it has no such files, or was written before there were such records
    try:
        expected = msgspec.json.decode((directory / BESIDE).read_bytes(), type=dict[str, FileRecord])
        found = {name: file_record(directory / Path(name).name) for name in expected}
    except (OSError, *UNREADABLE) as error:
        raise TornVersion(f"{directory.name}: {error}") from error
    for name, record in expected.items():
        if found[name] != record:
            raise TornVersion(f"{directory.name}: {name} has {found[name]}, expected {record}")


def _files_in(manifest: bytes, directory: Path) -> bytes:
    """Return the current lines of the files that a manifest names."""
    named = [line for line in manifest.splitlines() if f'"dtype":"{FILE}"'.encode() in line]
    records = [msgspec.json.decode(line, type=TensorRecord) for line in named]
    found = [file_line(one.name, (directory / Path(one.name).name).read_bytes()) for one in records]
    return manifest_of_records(found)
