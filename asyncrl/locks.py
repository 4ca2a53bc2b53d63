"""Locks of files and directories, which end with their handle, and with its process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock(path: Path, *, shared: bool = False) -> int:
    """Lock a file once others have released it, and create it if necessary; returns its open handle."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    return handle


def lock_folder(path: Path, *, shared: bool = False) -> int:
    """Lock a folder as `lock` does a file.

    Raises:
        FileNotFoundError: it is not there.
    """
    handle = os.open(path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    return handle


def take(path: Path) -> int | None:
    """Lock a file as `lock` does; None where another process has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if try_lock(handle):
        return handle
    os.close(handle)
    return None


def try_lock(handle: int, *, shared: bool = False) -> bool:
    """Lock an open file; False if another process has it."""
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
