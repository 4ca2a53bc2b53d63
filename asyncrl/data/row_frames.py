"""The frames between a process that makes rows and its parent: length-prefixed MessagePack over pipes."""

from __future__ import annotations

from typing import Any

import msgspec

from topics.prompts import PromptRow


class RowSetup(msgspec.Struct):
    """First frame to the child: the data that it opens. The fields are the arguments of `open_source`."""

    spec: str
    options: dict[str, Any]
    seed: int
    base: str
    labels_for: str = ""
    longest: int = 0  # so many of the longest rows of a file are named in the answer


class Opened(msgspec.Struct):
    """First frame from the child: the data is open, or why not."""

    error: str = ""
    rows_per_epoch: int | None = None
    description: str = ""
    longest: list[int] = msgspec.field(default_factory=list)  # places in the first epoch


class RowsWanted(msgspec.Struct, array_like=True):
    """Rows to make, in this order, after those asked for before."""

    numbers: list[int]


class RowMade(msgspec.Struct, array_like=True):
    """One row, or why it cannot be made."""

    number: int
    row: PromptRow | None = None
    error: str = ""
