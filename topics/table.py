"""All topics in one table."""

from __future__ import annotations

from typing import Any

from topics import actors, batches, engines, evals, groups, prompts, stalls, streams, trajectories, weights
from topics.topic import Topic
from topics.wire import Message

TOPICS: tuple[Topic[Any], ...] = (
    *prompts.TOPICS,
    *trajectories.TOPICS,
    *groups.TOPICS,
    *batches.TOPICS,
    *weights.TOPICS,
    *engines.TOPICS,
    *evals.TOPICS,
    *stalls.TOPICS,
    *streams.TOPICS,
    *actors.TOPICS,
)

BY_NAME: dict[str, Topic[Any]] = {topic.name: topic for topic in TOPICS}
_BY_TYPE: dict[type[Message], Topic[Any]] = {
    topic.message: topic for topic in TOPICS if topic.message not in actors.SHARED_TYPES
}


def topic_for(message: Message) -> Topic[Any]:
    """The topic of a message, by its type.

    Raises:
        LookupError: none has this type, or several share it, as those of keepers' logs do.
    """
    for kind in type(message).__mro__:
        if kind in _BY_TYPE:
            return _BY_TYPE[kind]
    raise LookupError(f"{type(message).__name__} is the message of no topic, or of several: name the topic")


def topic_of(subject: str) -> Topic[Any] | None:
    """The topic a subject belongs to, or None for a subject that is in no row of the table."""
    parts = subject.split(".")
    return BY_NAME.get(f"{parts[2]}.{parts[3]}") if len(parts) >= 4 else None


def ingest_of(subject: str) -> str:
    """Return where a message is published that its stream stores under `subject`.

    Raises:
        ValueError: no topic has such a subject.
    """
    topic = topic_of(subject)
    if topic is None:
        raise ValueError(f"{subject} is in no row of the topic table")
    return topic.stream.ingest(subject)
