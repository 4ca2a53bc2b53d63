"""Check of the files of a version against its identity."""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncrl.errors import AsyncRLError
from asyncrl.weights.tensors import FILE, TensorRecord, digest_of, file_line, manifest_of_records, read_manifest

MANIFEST = "manifest.jsonl"


class TornVersion(AsyncRLError):
    """A version whose bytes are not all there, or not those that were published."""


def check_version(directory: Path, digest: str) -> None:
    """Check all tensors of a version, and the files that its manifest names beside them, against its digest.

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


def _files_in(manifest: bytes, directory: Path) -> bytes:
    """Return the lines of the files that a manifest names, as they are now."""
    named = [line for line in manifest.splitlines() if f'"dtype":"{FILE}"'.encode() in line]
    records = [msgspec.json.decode(line, type=TensorRecord) for line in named]
    found = [file_line(one.name, (directory / Path(one.name).name).read_bytes()) for one in records]
    return manifest_of_records(found)
