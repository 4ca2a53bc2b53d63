"""Dictionaries of algorithms: what a config, and the objective of a batch, names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from asyncrl.errors import AsyncRLError

T = TypeVar("T")


class AlgorithmError(AsyncRLError):
    """An objective that this installation cannot obey."""


def named(table: Mapping[str, T], name: str, kind: str) -> T:
    """Look up an entry of a dictionary.

    Args:
        kind: what its entries are, as the error names it, such as `loss`.

    Raises:
        AlgorithmError: it has no such entry.
    """
    if name not in table:
        raise AlgorithmError(f'{kind} "{name}" is not known here, expected one of {", ".join(sorted(table))}')
    return table[name]


def names(table: Mapping[str, object]) -> tuple[str, ...]:
    """The names of a dictionary's entries, for the type of a setting."""
    return tuple(sorted(table))
