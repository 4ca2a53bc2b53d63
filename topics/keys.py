"""Messages about the API keys of a gateway's clients, and what counts against their limits."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from topics.topic import ACTORS, TURNS, Topic
from topics.wire import Count, Id, MaybeId, Message, Seconds

Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class KeyAdded(Message):
    """Requests with a new API key are answered; the key itself is in no message."""

    key_id: Id
    tenant: Id
    digest: Digest  # SHA-256 of the key
    requests_per_minute: Count = 0  # of its tenant, above which they are refused; 0: any number
    tokens_per_day: Count = 0  # of its tenant's prompts and replies, above which requests are refused; 0: any number
    private: bool = False  # nothing of its requests is stored but counts


class KeyRevoked(Message):
    """Requests with this key are answered no more."""

    key_id: Id


class TurnCounted(Message):
    """Size of an ended request whose key has limits, or whose turns are not all stored."""

    turn_id: Id
    tenant: Id
    begun_s: Seconds  # since 1970
    tokens: Count  # of prompts and replies
    api_key: MaybeId = ""  # id of the API key of its request; "": not known
    replies: Count = 1  # that are stored in no turn


KEY_ADDED = Topic(KeyAdded, ACTORS, ("operator",), ("gateway",), key="key_id")
KEY_REVOKED = Topic(KeyRevoked, ACTORS, ("operator",), ("gateway",), key="key_id")
TURN_COUNTED = Topic(TurnCounted, TURNS, ("gateway",), ("gateway", "monitor"), key="turn_id")
