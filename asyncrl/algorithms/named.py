"""Dictionaries of algorithms: what a config, and the objective of a batch, names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import msgspec
import numpy as np

from asyncrl.errors import AsyncRLError, FunctionError, last_lines
from asyncrl.functions import load_function

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class AlgorithmError(AsyncRLError):
    """An objective that this installation cannot obey. A restart does not help."""

    fatal = True


class Table(dict[str, T]):
    """Algorithms by name, and the user's own: `/path/to/file.py:name` or `package.module:name`, loaded on first use.

    A config that is read makes paths absolute, so that all processes of a run, and a replay, find the same file.
    """

    def __init__(self, entries: Mapping[str, T], made: Callable[[Any], T]) -> None:
        """Take the entries, and what makes one of a user's function or class.

        Args:
            made: raises TypeError if the value is invalid.
        """
        super().__init__(entries)
        self._made = made
        self._own: dict[str, T] = {}

    def __missing__(self, name: str) -> T:
        if ":" not in name:
            raise KeyError(name)
        if name not in self._own:
            try:
                self._own[name] = self._made(load_function(name, base=Path("/")))
            except FunctionError as error:
                raise AlgorithmError(str(error)) from error
            except TypeError as error:
                raise AlgorithmError(f"{name}: {error}") from error
        return self._own[name]

    def loaded(self, name: str) -> T | None:
        """Return an entry, if it is no user's or was loaded."""
        return self.get(name, self._own.get(name))


def guarded(function: Callable[P, R]) -> Callable[P, R]:
    """Turn any exception of a user's function into an `AlgorithmError` that names it."""

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return function(*arguments, **options)
        except (Exception, SystemExit) as error:  # anything may happen in a user's function
            raise AlgorithmError(
                f"{getattr(function, '__qualname__', function)} raised\n{last_lines(error)}"
            ) from error

    return call


def numbers(values: Any, dtype: type[np.floating[Any]]) -> np.ndarray[Any, Any]:
    """Return what a user's function gave as real numbers; raises TypeError for text and complex numbers."""
    found = np.asarray(values)
    if found.dtype.kind not in "biufO":
        raise TypeError(f"it gave values of type {found.dtype}, expected real numbers")
    return found.astype(dtype)


def with_call(base: type[T], call: Callable[..., Any]) -> type[T]:
    """Derive from a struct whose options are its fields another one that is called in this way."""
    own: Any = msgspec.defstruct("Own", [], bases=(base,), namespace={"__call__": call}, frozen=True)
    return cast(type[T], own)


def named(table: Mapping[str, T], name: str, kind: str) -> T:
    """Look up an entry of a dictionary.

    Args:
        kind: what its entries are, as the error names it, such as `loss`.

    Raises:
        AlgorithmError: it has no such entry, or the user's own cannot be loaded.
    """
    if name not in table and not (isinstance(table, Table) and ":" in name):
        raise AlgorithmError(f'{kind} "{name}" is not known here, expected one of {", ".join(sorted(table))}')
    return table[name]


def names(table: Mapping[str, object]) -> tuple[str, ...]:
    """The names of a dictionary's entries, for the type of a setting."""
    return tuple(sorted(table))
