"""Messages about profiles of processes."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from topics.topic import ACTORS, Topic
from topics.wire import Id, Message


class ProfileRequested(Message):
    """Request to the learner to record its next steps."""

    steps: Annotated[int, Meta(ge=1, le=32)]


class ProfileStored(Message):
    """A profile or stack of an actor is in the directory of the run."""

    actor_id: Id
    kind: Literal["steps", "cpu", "engine", "stack"]
    path: Annotated[str, Meta(max_length=1024)]  # below the run's directory


PROFILE_REQUESTED = Topic(ProfileRequested, ACTORS, ("operator",), ("learner",), repeats=True)
PROFILE_STORED = Topic(ProfileStored, ACTORS, ("learner", "operator"), ("learner", "monitor"), repeats=True)
