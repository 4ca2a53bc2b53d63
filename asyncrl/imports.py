"""Imports of packages without the work that they do for features which a process does not use."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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


class _LateContext(ssl.SSLContext):
    """A TLS context that reads the system's certificates when its first connection opens."""

    def wrap_bio(self, *given: Any, **named: Any) -> ssl.SSLObject:
        self._load()
        return self.wrap_bio(*given, **named)

    def wrap_socket(self, *given: Any, **named: Any) -> ssl.SSLSocket:
        self._load()
        return self.wrap_socket(*given, **named)

    def _load(self) -> None:
        self.__class__ = ssl.SSLContext  # type: ignore[assignment]
        self.load_default_certs()


@contextmanager
def late_certificates() -> Iterator[None]:
    """Let TLS contexts that are made within the block read the system's certificates at their first use.

    aiohttp makes two contexts when it is imported. Each takes 0.04 s of a core, and most processes use neither.
    """

    def defer(context: ssl.SSLContext, purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH) -> None:
        context.__class__ = _LateContext

    load = ssl.SSLContext.load_default_certs
    ssl.SSLContext.load_default_certs = defer  # type: ignore[method-assign, assignment]
    ssl.SSLContext.set_default_verify_paths = defer  # type: ignore[method-assign, assignment]  # which it inherits
    try:
        yield
    finally:
        ssl.SSLContext.load_default_certs = load  # type: ignore[method-assign]
        del ssl.SSLContext.set_default_verify_paths
