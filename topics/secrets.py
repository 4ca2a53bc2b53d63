"""Messages about data keys: each encrypts the live traffic of one tenant, user and day."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from topics.topic import ACTORS, SECRETS, Topic
from topics.wire import Id, Message

Owner: TypeAlias = Annotated[str, Meta(max_length=64)]  # digest of a tenant, or of it and a user; "": all
Day: TypeAlias = Annotated[str, Meta(max_length=16)]  # UTC, "20261231"; "": of any


class SecretMade(Message):
    """A data key that encrypts the turns of one user and day.

    Only this message has the key: deleting it makes everything encrypted with it unreadable."""

    secret_id: Id  # OWNER_DAY_RANDOM, as `asyncrl.live.tenant_keys` makes it
    key: bytes  # 32


class PurgeRequested(Message):
    """These data keys are to be erased: open work that is sealed under one of them ends as `purged`."""

    purge_id: Id
    owner: Owner  # whose they are
    before: Day  # of days before this one
    reason: Literal["operator", "retention"]
    secrets: list[Id] = field(default_factory=list)  # that were there; they are erased after this is stored


SECRET_MADE = Topic(
    SecretMade,
    SECRETS,
    ("gateway",),
    ("gateway", "judge", "rollout", "reward", "groupreward", "learner", "recorder"),
    key="secret_id",
)
PURGE_REQUESTED = Topic(
    PurgeRequested, ACTORS, ("operator", "supervisor"), ("gateway", "sessions", "buffer", "recorder"), key="purge_id"
)
