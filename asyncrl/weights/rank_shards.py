"""Shares of a version or checkpoint: the tensors that each rank of a trainer writes.

Each rank writes its files aside. The first rank takes all of them over once they are durable, adds what describes them,
and gives the whole its name: what a killed rank leaves has none, so it is never read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from asyncrl.crash import crash_point
from asyncrl.weights.directories import (
    WRITE_FAULTS,
    CheckpointError,
    failed_write,
    remove_leftovers,
    sync,
    version_name,
)
from asyncrl.weights.folders import DiskFolder, Folder


class Sized(NamedTuple):
    """A tensor that some rank is to write."""

    stem: str  # see `Files`
    name: str
    bytes: int
    holders: Sequence[int] = ()  # ranks that have any of it, one of which writes it; (): all ranks


class Attempt(msgspec.Struct, frozen=True):
    """One attempt of all ranks to write a version."""

    lineage: int
    version: int
    token: str  # 16 hexadecimal digits of this attempt alone

    @property
    def name(self) -> str:
        """Name of the version without its identity."""
        return version_name(self.lineage, self.version)


class StoredFiles(msgspec.Struct, frozen=True):
    """The files of one rank, durable, and part of nothing yet."""

    rank: int
    place: str  # a directory; in the store `stream` the name of the version
    files: dict[str, int]  # sizes in bytes
    chunks: int = 0  # in the store `stream`


@dataclass
class Filling:
    """A folder that a rank fills; `stored` is set after the block that yielded it."""

    folder: Folder
    stored: StoredFiles = field(init=False)


def owners(tensors: Sequence[Sized], ranks: int, whole: Collection[str] = ()) -> list[int]:
    """Return the rank that writes each tensor: a function of their sizes and holders, equal on all ranks.

    The ranks have about as many bytes each. Those that few ranks hold are dealt out first, then large ones before small
    ones, each to the rank with the fewest bytes.

    Args:
        whole: stems whose tensors one rank writes into one file, as their readers want them; the first one does.
    """
    if ranks == 1:
        return [0] * len(tensors)
    everyone, found, loads = range(ranks), [0] * len(tensors), [0] * ranks
    dealt = [place for place, one in enumerate(tensors) if one.stem not in whole]
    dealt.sort(key=lambda place: (len(tensors[place].holders or everyone), -tensors[place].bytes, tensors[place][:2]))
    for place in dealt:
        one = tensors[place]
        found[place] = min(one.holders or everyone, key=loads.__getitem__)
        loads[found[place]] += one.bytes
    return found


@contextmanager
def written_share(target: Path, rank: int) -> Iterator[Filling]:
    """Give a rank a separate directory next to a target to fill; it stays until `take_shares` or `drop_share`.

    Raises:
        CheckpointError: the disk refused it; no files remain.
    """
    path = target.parent / f".{target.name}.rank{rank}.{os.getpid()}.partial"
    try:
        remove_leftovers(target)
        shutil.rmtree(path, ignore_errors=True)  # of an attempt before, which another rank could not follow
        path.mkdir(parents=True)
        filling = Filling(DiskFolder(path))
        yield filling
        files = sorted(path.iterdir())
        sync(path)
        filling.stored = StoredFiles(rank, str(path), {file.name: file.stat().st_size for file in files})
    except BaseException as error:
        shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, WRITE_FAULTS):
            raise failed_write(target, error) from error
        raise
    crash_point("share.written")


def take_shares(shares: Sequence[StoredFiles], directory: Path) -> None:
    """Move the files of all ranks into one directory.

    Raises:
        CheckpointError: a file is missing or cut short.
        OSError: the disk refused it.
    """
    for share in shares:
        for name, size in share.files.items():
            path = Path(share.place, name)
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes"
                raise CheckpointError(
                    f"{path} {state}, expected {size} bytes; the share of rank {share.rank} is torn, and nothing of it "
                    "was published: look for what else writes there"
                )
            path.rename(directory / name)
        drop_share(share)


def drop_share(share: StoredFiles) -> None:
    """Remove the remains of a share on disk."""
    if share.place and Path(share.place).is_absolute():
        shutil.rmtree(share.place, ignore_errors=True)


Describe = Callable[[Folder], None]
"""Adds to the files of all ranks what describes them."""
