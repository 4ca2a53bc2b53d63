"""Versions in the store, as the supervisor knows them."""

from __future__ import annotations

import msgspec

from topics.ids import weights_name


class StoredVersion(msgspec.Struct, frozen=True):
    """A version in the store."""

    lineage: int
    version: int
    digest: str
    sequence: int  # of its weights.published

    @property
    def key(self) -> str:
        """Its name on engines."""
        return weights_name(self.lineage, self.version, self.digest)
