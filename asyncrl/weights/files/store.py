"""Versions as Hugging Face directories in a shared folder, never overwritten."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from asyncrl.crash import crash_point
from asyncrl.weights.directories import VERSION_NAME, prune_directories, remove_directory, written_aside
from asyncrl.weights.folders import DiskFolder
from asyncrl.weights.rank_shards import (
    Attempt,
    Describe,
    Filling,
    StoredFiles,
    drop_share,
    take_shares,
    written_share,
)
from asyncrl.weights.verify import TornVersion, check_version
from topics.wire import WireError


class FileStore:
    """See `WeightStore`: directories that inference servers can load directly, each with its manifest."""

    name = "files"
    is_local = True

    def __init__(self, root: Path) -> None:
        self._root = root

    def share(self, attempt: Attempt, rank: int) -> AbstractContextManager[Filling]:
        return written_share(self._root / attempt.name, rank)

    def complete(
        self, attempt: Attempt, digest: str, shares: Sequence[StoredFiles], describe: Describe, *, delta: bool = False
    ) -> str:
        """See `WeightStore.complete`. A full version that is there already, as after a replay, is kept if it is whole.

        Raises:
            CheckpointError: a file of a share is missing or cut short, or the disk refused it.
        """
        target = self._root / f"{attempt.name}-{digest[:12]}{'.delta' if delta else ''}"
        if target.exists():
            if not delta and _is_whole(target, digest):
                for share in shares:
                    drop_share(share)
                return str(target)
            remove_directory(target)
        with written_aside(target) as aside:
            take_shares(shares, aside.path)
            crash_point("weights.written")
            describe(DiskFolder(aside.path))
        return str(target)

    def prune(self, keep: Container[str], newest: tuple[int, int]) -> int:
        """Remove the versions that are not among these names of directories; returns how many.

        Args:
            newest: lineage and version of the newest one published. It, or a newer one, may be about to be published.
        """
        return prune_directories(self._root, VERSION_NAME, keep, newest)

    def check(self, location: str) -> None:
        place = Path(location)
        store = self._root.resolve()  # a run may be resumed by another of the paths that lead to it
        if place.name == ".." or place.parent.resolve() != store:  # a link in there is the owner's own
            raise WireError(f"its weights lie in {location[:200]!r}, not in this run's store {store}")

    async def has(self, location: str) -> bool:
        return await asyncio.to_thread(Path(location).is_dir)

    async def read(self, location: str, into: Path) -> Path:
        return Path(location)


def _is_whole(directory: Path, digest: str) -> bool:
    """Return whether a directory holds a version, bit for bit."""
    try:
        check_version(directory, digest)
    except TornVersion:
        return False
    return True
