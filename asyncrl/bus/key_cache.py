"""Data keys that a process knows: they live in its memory for a short while, and are never written."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

from asyncrl.errors import AsyncRLError

_KEPT = 4096  # keys that a process remembers
_KEPT_S = 30.0  # seconds in memory: erased keys are forgotten soon


class SecretGone(AsyncRLError):
    """A data key is missing, erased, or forbidden to this login: messages encrypted with it have no content."""


class Vault:
    """Data keys that a process knows for a while, and those that were erased."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._erased: set[str] = set()

    def put(self, secret: str, key: bytes, *, until_s: float | None = None) -> None:
        """Remember a key.

        Args:
            until_s: of the monotonic clock; None for a short while.
        """
        if secret not in self._erased:
            self._known[secret] = (time.monotonic() + _KEPT_S if until_s is None else until_s, key)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)

    def get(self, secret: str) -> bytes | None:
        """Return a key that is remembered.

        Raises:
            SecretGone: it was erased.
        """
        if secret in self._erased:
            raise SecretGone(f"data key {secret} was erased")
        until_s, key = self._known.get(secret, (0.0, b""))
        return key if until_s > time.monotonic() else None

    def erase(self, secrets: Iterable[str]) -> None:
        """Forget keys permanently."""
        self._erased.update(secrets)
        for secret in secrets:
            self._known.pop(secret, None)
