"""Imports of packages without the optional ones that they load wherever these are installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def absent(name: str) -> Iterator[None]:
    """Have imports of a module fail within the context, as if it were not installed, unless it is loaded already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # so an import of it raises ImportError
    try:
        yield
    finally:
        del sys.modules[name]
