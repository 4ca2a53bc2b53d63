"""All topics in one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from topics import (
    actors,
    batches,
    engines,
    evals,
    gpu_handoff,
    groups,
    keys,
    promotions,
    prompts,
    runs,
    secrets,
    stages,
    stalls,
    streams,
    trajectories,
    turns,
    weights,
)
from topics.roles import ROLES, Role, add_role
from topics.topic import EVALUATIONS, STREAMS, Stream, Topic
from topics.wire import Headers, Message

_NOUNS = (
    *(prompts, trajectories, groups, batches, weights, promotions, engines, gpu_handoff),
    *(evals, runs, stages, stalls, streams, secrets, keys, turns, actors),
)

TOPICS = [topic for noun in _NOUNS for topic in vars(noun).values() if isinstance(topic, Topic)] + actors.KEEPER_TOPICS
BY_NAME: dict[str, Topic[Any]] = {topic.name: topic for topic in TOPICS}


def _by_type(topics: Sequence[Topic[Any]]) -> dict[type[msgspec.Struct], Topic[Any]]:
    kinds = ((kind, topic) for topic in topics for kind in (topic.message, topic.message.HEADERS))
    return {kind: topic for kind, topic in kinds if kind is not Headers}


_BY_TYPE = _by_type([topic for topic in TOPICS if topic.message not in actors.SHARED_TYPES])


class WorkQueue(NamedTuple):
    """A durable consumer that the processes of a role share."""

    name: str
    role: str
    topic: Topic[Any]
    evaluations: bool = False  # it has those alone, and the other queue of the role all the rest

    @property
    def stream(self) -> Stream:
        """The stream it reads."""
        return self.topic.stream

    def pattern(self, run: str) -> str:
        """The subjects of its messages."""
        if not self.topic.lane:
            return self.topic.pattern(run)
        return f"asyncrl.{run}.{self.topic.name}.{f'{EVALUATIONS}.' if self.evaluations else ''}*"


def _queues(role: Role) -> dict[str, WorkQueue]:
    """The work queues of a role by name: one, and where its topic has a lane for evaluations one for them."""
    if not role.queue:
        return {}
    topic, name = BY_NAME[role.queue], f"{role.name}-{EVALUATIONS}"
    found = {role.name: WorkQueue(role.name, role.name, topic)}
    return found | {name: WorkQueue(name, role.name, topic, evaluations=True)} if topic.lane else found


QUEUES = {name: queue for role in ROLES for name, queue in _queues(role).items()}


def queues_of(role: str) -> list[WorkQueue]:
    """The work queues of a role, that of evaluations last."""
    return [queue for queue in QUEUES.values() if queue.role == role]


def topic_for(message: Message) -> Topic[Any]:
    """The topic of a message, by its type.

    Raises:
        LookupError: none has this type, or several share it, as those of keepers' logs do.
    """
    return topic_of_type(type(message))


def topic_of_type(kind: type[msgspec.Struct]) -> Topic[Any]:
    """The topic whose messages, or their headers, have a type.

    Raises:
        LookupError: there is none, or several share it.
    """
    for base in kind.__mro__:
        if base in _BY_TYPE:
            return _BY_TYPE[base]
    named = [topic for topic in TOPICS if topic.message.__name__ == kind.__name__ and topic.message is not kind]
    if twin := next(iter(named), None):
        words = f"{kind.__name__} of module {kind.__module__} is the message of no topic; that of topic {twin.name}"
        raise LookupError(f"{words} is of module {twin.message.__module__}: a file with two names is run twice")
    raise LookupError(f"{kind.__name__} is the message of no topic, or of several: name the topic")


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


def subscribers_of(topic: Topic[Any]) -> Sequence[str]:
    """Return the roles that subscribe to a topic: by the topic's row, or by their own."""
    others = [role.name for role in ROLES if topic.name == role.queue or topic.name in role.subscribes]
    others = [name for name in others if name not in topic.subscribers]
    return [*topic.subscribers, *others] if others else topic.subscribers


def register(role: Role, topics: Sequence[Topic[Any]]) -> None:
    """Add a user's actor: its row and those of its topics, from which streams, permissions and docs follow.

    `topics.validate_user_topics` has checked them; `register_queues` follows, once the topics of all actors are there.
    """
    streams = [stream for stream in dict.fromkeys(topic.stream for topic in topics) if stream not in STREAMS]
    added = [*topics, *(topic for stream in streams for topic in actors.keeper_topics(stream))]
    add_role(role)
    STREAMS.extend(streams)
    TOPICS.extend(added)
    BY_NAME.update((topic.name, topic) for topic in added)
    _BY_TYPE.update(_by_type(topics))


def register_queues(role: Role) -> None:
    """Add the work queue of a user's actor, whose topic may be another one's."""
    QUEUES.update(_queues(role))
