"""Files that are written whole or not at all, or for their owner alone; and the room that files take."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Faults of a disk that is full, or takes no files at all."""


def open_private(path: Path, mode: str) -> BinaryIO:
    """Open a file; one that this creates can be read by its owner alone.

    Args:
        mode: as of `open`, of bytes.
    """
    return cast("BinaryIO", open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600)))


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read, in one step."""
    aside = path.with_name(path.name + ".new")
    with open_private(aside, "wb") as file:
        file.write(content)
    os.replace(aside, path)


def secret_fault(path: Path, *, header: bool = True) -> str:
    """Return the content of a file that should hold a secret, or why it cannot be read; "" if it holds one.

    Args:
        path: of the file.
        header: whether a header of HTTP is to carry it, which takes one line.
    """
    try:
        return fault_of_secret(path.read_bytes(), header=header)
    except OSError as error:
        return error.strerror or str(error)


def fault_of_secret(content: bytes, *, header: bool = True) -> str:
    """Return a description of invalid content, as `secret_fault` does."""
    try:
        secret = content.decode().strip()
    except UnicodeDecodeError as error:
        return str(error)
    if header and not secret.isprintable():
        return "several lines, or control characters"
    return "" if secret else "nothing"


def append_private(path: Path, content: bytes) -> None:
    """Add to a file that only this user can read."""
    with open_private(path, "ab") as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, in one step."""
    aside = path.with_name(path.name + ".new")
    aside.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
    os.replace(aside, path)


def disk_usage(folder: Path) -> int:
    """Return the disk usage of the files of a folder in bytes; files and folders may appear and vanish."""
    total = 0
    for inside, _, names in os.walk(folder):  # passes over a folder that is gone, where `Path.rglob` fails
        for name in names:
            try:
                total += os.lstat(os.path.join(inside, name)).st_blocks * 512
            except FileNotFoundError:
                pass  # a live run removes old weights
    return total
