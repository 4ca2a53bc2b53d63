"""Check of the files of a version against its identity."""

from __future__ import annotations

from pathlib import Path

from asyncrl.errors import AsyncRLError
from asyncrl.weights.tensors import digest_of, read_manifest

MANIFEST = "manifest.jsonl"


class TornVersion(AsyncRLError):
    """A version whose bytes are not all there, or not those that were published."""


def check_version(directory: Path, digest: str) -> None:
    """Check all tensors of a version against its digest.

    Raises:
        TornVersion: they are others, or cannot be read.
    """
    try:
        manifest = (directory / MANIFEST).read_bytes()
        found = read_manifest(sorted(directory.glob("*.safetensors")))
    except (OSError, ValueError) as error:
        raise TornVersion(f"{directory.name}: {error}") from error
    if digest_of(manifest) != digest:
        raise TornVersion(f"{directory.name}: its manifest has digest {digest_of(manifest)}, expected {digest}")
    wrong = sorted({*manifest.splitlines()} ^ {*found.splitlines()})
    if wrong:
        raise TornVersion(f"{directory.name}: {len(wrong)} tensors differ from its manifest, one of them {wrong[0]!r}")
