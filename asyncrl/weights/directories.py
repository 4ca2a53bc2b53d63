"""Directories that are complete or absent: written aside, synced and renamed; renamed aside, then removed."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from asyncrl.crash import crash_point
from asyncrl.errors import AsyncRLError

WRITE_FAULTS = (OSError, SafetensorError)  # safetensors reports a failed write as a separate error class
VERSION_NAME = re.compile(r"lineage(?P<lineage>\d{1,9})-v(?P<number>\d{6,10})-", re.ASCII)  # the identity follows


class CheckpointError(AsyncRLError):
    """A checkpoint or version that cannot be written, or must not be read."""


class OtherModel(AsyncRLError):
    """A whole checkpoint of another model, or of other adapters, than are trained; those before it are, too."""


def version_name(lineage: int, version: int) -> str:
    """Name of a version in a store without its identity: `lineage0-v000007`."""
    return f"lineage{lineage}-v{version:06d}"


@dataclass
class Aside:
    """A directory that is being filled."""

    path: Path
    target: Path  # its place when it is filled; may be set until then


def prune_directories(root: Path, pattern: re.Pattern[str], keep: Container[str], newest: tuple[int, int]) -> int:
    """Remove directories of a numbered kind; returns how many.

    Args:
        pattern: of their names, with groups `lineage` and `number`.
        keep: names of those that stay.
        newest: (lineage, number) from which on nothing is removed.
    """
    for leftover in root.glob(".*.old"):
        shutil.rmtree(leftover, ignore_errors=True)
    old = []
    for directory in root.iterdir() if root.exists() else ():
        found = pattern.match(directory.name)
        if found and directory.name not in keep and (int(found["lineage"]), int(found["number"])) < newest:
            old.append(directory)
    for directory in old:
        remove_directory(directory)
    return len(old)


def remove_directory(directory: Path) -> None:
    """Remove a directory; a concurrent reader finds all of it or nothing, never a part."""
    aside = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    directory.rename(aside)
    crash_point("prune.inside")
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def written_aside(target: Path, *, synced: bool = True) -> Iterator[Aside]:
    """Give a directory to fill that becomes its target when all of it is on disk, or vanishes.

    Args:
        synced: whether it survives a loss of power; what can be fetched again need not.

    Raises:
        CheckpointError: when the target exists or the disk refuses a write.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists; it is never overwritten, choose another name or remove it")
    aside = Aside(target.parent / f".{target.name}.{os.getpid()}.partial", target)
    remove_leftovers(target)
    try:
        aside.path.mkdir(parents=True)
        yield aside
        for path in [*aside.path.iterdir(), aside.path] if synced else ():
            sync(path)
        try:
            aside.path.rename(aside.target)
        except OSError:
            if not aside.target.is_dir():
                raise
            shutil.rmtree(aside.path, ignore_errors=True)  # it is there already, with the same content
        if synced:
            sync(target.parent)
    except BaseException as error:
        shutil.rmtree(aside.path, ignore_errors=True)
        if isinstance(error, WRITE_FAULTS):
            raise failed_write(aside.target, error) from error
        raise


def remove_leftovers(target: Path) -> None:
    """Remove half-written directories of killed writers, of this directory and of others of its kind."""
    kind = re.split(r"\d", target.name)[0] or target.name
    for left in target.parent.glob(f".{kind}*.partial"):
        pid = left.name.split(".")[-2]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(left, ignore_errors=True)


def failed_write(target: Path, error: BaseException) -> CheckpointError:
    """Return the error that names what could not be written."""
    return CheckpointError(f"{target} could not be written: {_reason(error)}")


def _reason(error: BaseException) -> str:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "the disk is full; free some space; the files before are intact" if full else str(error)


def sync(path: Path) -> None:
    """Let a file or directory survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
