"""Small disks for tests: a file system of its own at a folder."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """A file system of this size at a new folder; the test is skipped where none can be mounted."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={megabytes * 1000}k", "tmpfs", folder]
    mounted = subprocess.run(words, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def locked_disk(folder: Path) -> Iterator[None]:
    """Let a small disk take no files."""
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)


def leave_free(folder: Path, megabytes: int) -> None:
    """Let a file take the room of a file system, but for so many MB."""
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free - megabytes * 1_000_000)
