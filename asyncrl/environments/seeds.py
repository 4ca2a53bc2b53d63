"""Draws that depend on nothing but their arguments."""

from __future__ import annotations

import hashlib


def draw(what: str, seed: int, index: int, below: int) -> int:
    """A whole number in [0, below) that depends on nothing but the arguments; below may be up to 2**448."""
    digest = hashlib.blake2b(f"{what}:{seed}:{index}".encode()).digest()
    return int.from_bytes(digest, "little") % below
