"""API keys of live traffic: made once, shown once, known by their digests."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping

from asyncrl.live.apis.schema import LiveError
from topics.keys import KeyAdded, KeyRevoked

PRIVATE_HEADER = "X-Asyncrl-Private"  # of a request of which nothing is to be stored but counts
_NOT_PRIVATE = ("", "0", "false", "no", "off")  # values of the header; any other one asks for privacy
_PREFIX = "sk-asyncrl-"


def make_key(
    tenant: str, *, requests_per_minute: int = 0, tokens_per_day: int = 0, private: bool = False
) -> tuple[str, KeyAdded]:
    """Return a new key, and the message that makes it valid; its limits are 0 for none."""
    key = _PREFIX + secrets.token_urlsafe(32)
    added = KeyAdded(
        key_id=secrets.token_hex(6),
        tenant=tenant,
        digest=digest_of(key),
        requests_per_minute=requests_per_minute,
        tokens_per_day=tokens_per_day,
        private=private,
    )
    return key, added


def digest_of(key: str) -> str:
    """Return the SHA-256 of a key, which has 256 random bits: nothing slower is needed."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def is_private(key: KeyAdded, headers: Mapping[str, str]) -> bool:
    """Return whether nothing of a request is to be stored but counts."""
    return key.private or headers.get(PRIVATE_HEADER, "").strip().lower() not in _NOT_PRIVATE


class Keys:
    """The keys of a run, folded from its topics."""

    def __init__(self) -> None:
        self.valid: dict[str, KeyAdded] = {}  # by id
        self._revoked: set[str] = set()
        self._by_digest: dict[str, KeyAdded] = {}
        self._tenants = Counter[str]()  # by the number of their valid keys

    def take(self, message: KeyAdded | KeyRevoked) -> None:
        """Fold in a key, or its end, which wins in any order."""
        if isinstance(message, KeyRevoked):
            self._revoked.add(message.key_id)
            gone = self.valid.pop(message.key_id, None)
            if gone is not None:
                self._by_digest.pop(gone.digest, None)
                self._tenants -= Counter([gone.tenant])
        elif message.key_id not in self._revoked:
            self._tenants[message.tenant] += message.key_id not in self.valid
            self.valid[message.key_id] = self._by_digest[message.digest] = message

    def are_of_several(self) -> bool:
        """Return whether several tenants have keys."""
        return len(self._tenants) > 1

    def tenant(self, headers: Mapping[str, str]) -> str:
        """Return the tenant whose key a request carries; raises as `key`."""
        return self.key(headers).tenant

    def key(self, headers: Mapping[str, str]) -> KeyAdded:
        """Return the key that a request carries, as `x-api-key` or `Authorization: Bearer`.

        Raises:
            LiveError: it carries none, or one that is not valid.
        """
        scheme, _, credentials = headers.get("Authorization", "").strip().partition(" ")
        given = headers.get("x-api-key") or (credentials.strip() if scheme.lower() == "bearer" else scheme)
        if not given:
            raise LiveError("key", "the request has no API key; send x-api-key, or Authorization: Bearer KEY")
        known = self._by_digest.get(digest_of(given))
        if known is None:
            raise LiveError("key", "the API key is not valid here; `asyncrl keys add` makes one")
        return known
