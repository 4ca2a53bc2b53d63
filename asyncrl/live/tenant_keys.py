"""Whose a turn is, and the names of data keys: digests, for a user's name may be private."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping

import msgspec

_MOST_READ = 4096  # characters of a user's name that are read as JSON
USER_HEADER = "x-asyncrl-user"  # names the user of a request, before what its body has


def user_of(headers: Mapping[str, str], given: str) -> str:
    """Return the user that a request names; "" for none.

    Args:
        given: by its body. Claude Code sends a JSON object there that has the session, too: a user is more than that.
    """
    named = headers.get(USER_HEADER) or given
    try:
        found = msgspec.json.decode(named) if named.startswith("{") and len(named) <= _MOST_READ else None
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):  # bytes of a header that are no text
        found = None
    if not isinstance(found, dict):
        return named
    return msgspec.json.encode({k: v for k, v in found.items() if k != "session_id"}, order="sorted").decode()


def tenant_digest(tenant: str) -> str:
    """Return what the owners of a tenant's turns begin with."""
    return _digest(tenant)


def owner_of(tenant: str, user: str) -> str:
    """Return the owner of the turns of a user; "" is the user of requests that name none."""
    return f"{_digest(tenant)}_{_digest(tenant, user)}"


def day_of(now_s: float) -> str:
    """Return the day (UTC) of a time in seconds since 1970: "20261231"."""
    return time.strftime("%Y%m%d", time.gmtime(now_s))


def new_secret(owner: str, now_s: float) -> str:
    """Return the id of a new data key: OWNER_DAY_RANDOM."""
    return f"{owner}_{day_of(now_s)}_{secrets.token_hex(4)}"


def owner_in(secret: str) -> str:
    """Return the owner in the id of a data key; "" for no id."""
    return secret.rsplit("_", 2)[0] if secret else ""


def covers(secret: str, owner: str, before: str) -> bool:
    """Return whether a data key is one of an owner, of a day before another.

    Args:
        owner: of a user's turns, or `tenant_digest`; "": any.
        before: "": any day.
    """
    whose, day, _ = secret.rsplit("_", 2)
    return f"{whose}_".startswith(f"{owner}_" if owner else "") and (not before or day < before)


def _digest(*parts: str) -> str:
    made = hashlib.blake2b(digest_size=8, person=b"asyncrl owner")
    for part in parts:
        raw = part.encode(errors="replace")
        made.update(len(raw).to_bytes(8) + raw)
    return made.hexdigest()
