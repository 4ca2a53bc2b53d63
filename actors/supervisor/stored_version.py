"""Versions in the store, as the supervisor knows them."""

from __future__ import annotations

import msgspec


class StoredVersion(msgspec.Struct, frozen=True):
    """A version in the store."""

    lineage: int
    version: int
    digest: str
    sequence: int  # of its weights.published

    @property
    def key(self) -> str:
        """Its name on engines."""
        return f"{self.lineage}:{self.version}:{self.digest}"
