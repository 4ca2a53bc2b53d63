"""The tables of a run: its roles, streams and topics, with all that follows from their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from topics import (
    actors,
    alerts,
    batches,
    engines,
    evals,
    gpu_handoff,
    groups,
    keys,
    profiles,
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
from topics.roles import ROLE_NAMES, ROLES, WORKERS, Role, WorkerPool
from topics.topic import EVALUATIONS, STREAMS, Stream, Topic
from topics.wire import Headers, Message

_NOUNS = (
    *(prompts, trajectories, groups, batches, weights, promotions, engines, gpu_handoff),
    *(evals, runs, stages, stalls, alerts, streams, secrets, keys, turns, profiles, actors),
)

TOPICS: tuple[Topic[Any], ...] = (
    *(topic for noun in _NOUNS for topic in vars(noun).values() if isinstance(topic, Topic)),
    *actors.KEEPER_TOPICS,
)


class WorkQueue(NamedTuple):
    """A durable consumer that the processes of a role, or of one pool of them, share."""

    name: str
    role: str
    topic: Topic[Any]
    evaluations: bool = False  # it has those alone, and the other queue of the pool all the rest
    pool: WorkerPool | None = None  # None: of the processes that work on all tasks without a pool

    @property
    def stream(self) -> Stream:
        """The stream it reads."""
        return self.topic.stream

    def pattern(self, run: str) -> str:
        """The subjects of its messages."""
        if not (self.topic.lane or self.topic.pooled):
            return self.topic.pattern(run)
        lane, pool = f"{EVALUATIONS}." if self.evaluations else "", f"{self.pool.name}." if self.pool else ""
        return f"asyncrl.{run}.{self.topic.name}.{lane}{pool}*"


@dataclass(frozen=True, eq=False)
class Tables:
    """The roles, streams and topics of a run: those of asyncrl, and those of the user's actors."""

    roles: tuple[Role, ...]
    streams: tuple[Stream, ...]
    topics: tuple[Topic[Any], ...]
    pools: tuple[WorkerPool, ...] = ()

    def extended(self, rows: Iterable[tuple[Role, Sequence[Topic[Any]]]]) -> Tables:
        """Return these tables with the rows of users' actors, which `topics.validate_user_topics` has checked."""
        roles, streams, topics = list(self.roles), list(self.streams), list(self.topics)
        for role, added in rows:
            new = [stream for stream in dict.fromkeys(topic.stream for topic in added) if stream not in streams]
            roles.append(role)
            streams += new
            topics += [*added, *(topic for stream in new for topic in actors.keeper_topics(stream))]
        return Tables(tuple(roles), tuple(streams), tuple(topics), self.pools)

    def with_pools(self, pools: Iterable[WorkerPool]) -> Tables:
        """Return these tables with pools of workers."""
        return Tables(self.roles, self.streams, self.topics, tuple(pools))

    @cached_property
    def role_names(self) -> Sequence[str]:
        """The names of all roles."""
        return tuple(role.name for role in self.roles)

    @cached_property
    def scalable(self) -> Sequence[str]:
        """The names of the roles that `asyncrl scale` changes."""
        return tuple(role.name for role in self.roles if role.scalable)

    @cached_property
    def by_name(self) -> Mapping[str, Topic[Any]]:
        """The topics by name."""
        return {topic.name: topic for topic in self.topics}

    @cached_property
    def _by_type(self) -> Mapping[type[msgspec.Struct], Topic[Any]]:
        single = [topic for topic in self.topics if topic.message not in actors.SHARED_TYPES]
        kinds = ((kind, topic) for topic in single for kind in (topic.message, topic.message.HEADERS))
        return {kind: topic for kind, topic in kinds if kind is not Headers}

    @cached_property
    def queues(self) -> Mapping[str, WorkQueue]:
        """The work queues by name: one for each pool of a role with a queue, and one for evaluations if its topic has a
        lane."""
        found = {}
        for role in self.roles:
            own = [one for one in self.pools if one.role == role.name]
            for pool in (None, *own) if role.queue else ():
                topic, name = self.by_name[role.queue], pool.pool if pool else role.name
                found[name] = WorkQueue(name, role.name, topic, pool=pool)
                name = f"{name}-{EVALUATIONS}"
                found |= {name: WorkQueue(name, role.name, topic, evaluations=True, pool=pool)} if topic.lane else {}
        return found

    def queues_of(self, role: str) -> list[WorkQueue]:
        """The work queues of all pools of a role."""
        return [queue for queue in self.queues.values() if queue.role == role]

    def queues_of_pool(self, pool: str) -> list[WorkQueue]:
        """The work queues of a pool such as `rollout` or `rollout-code`, that of evaluations last."""
        return [self.queues[name] for name in (pool, f"{pool}-{EVALUATIONS}") if name in self.queues]

    def queues_for(self, role: str, task: str) -> list[WorkQueue]:
        """The work queues of a role that hand out the work on a task, that of evaluations last."""
        queues = self.queues_of_pool(role)
        pool = self.pool_name(queues[0].topic, task) if queues else ""
        return self.queues_of_pool(f"{role}-{pool}") if pool else queues

    def pool_name(self, topic: Topic[Any], task: str) -> str:
        """The pool in the subjects of a topic's messages about a task; "" for none."""
        return self._pool_names.get((topic.stream.name, task), "") if topic.pooled else ""

    def subjects(self, topic: Topic[Any], run: str, key: str) -> list[str]:
        """All subjects under which messages about a key may be stored, whatever task it is of."""
        own = {pool for (stream, _), pool in self._pool_names.items() if stream == topic.stream.name and topic.pooled}
        return [topic.subject(run, key, pool) for pool in ("", *sorted(own))]

    @cached_property
    def _pool_names(self) -> Mapping[tuple[str, str], str]:
        """The names of the pools by the stream that they work off, and the task."""
        streams = {role.name: self.by_name[role.queue].stream.name for role in self.roles if role.queue}
        return {(streams[pool.role], task): pool.name for pool in self.pools for task in pool.tasks}

    def topic_for(self, message: Message) -> Topic[Any]:
        """The topic of a message, by its type; raises as `topic_of_type`."""
        return self.topic_of_type(type(message))

    def topic_of_type(self, kind: type[msgspec.Struct]) -> Topic[Any]:
        """The topic whose messages, or their headers, have a type.

        Raises:
            LookupError: none has this type, or several share it, as those of keepers' logs do.
        """
        for base in kind.__mro__:
            if base in self._by_type:
                return self._by_type[base]
        twins = (topic for topic in self.topics if topic.message.__name__ == kind.__name__)
        if twin := next((topic for topic in twins if topic.message is not kind), None):
            words = f"{kind.__name__} of module {kind.__module__} is the message of no topic; that of topic {twin.name}"
            raise LookupError(f"{words} is of module {twin.message.__module__}: a file with two names is run twice")
        raise LookupError(f"{kind.__name__} is the message of no topic, or of several: name the topic")

    def topic_of(self, subject: str) -> Topic[Any] | None:
        """The topic a subject belongs to, or None for a subject that is in no row."""
        parts = subject.split(".")
        return self.by_name.get(f"{parts[2]}.{parts[3]}") if len(parts) >= 4 else None

    def ingest_of(self, subject: str) -> str:
        """Return where a message is published that its stream stores under `subject`.

        Raises:
            ValueError: no topic has such a subject.
        """
        topic = self.topic_of(subject)
        if topic is None:
            raise ValueError(f"{subject} is in no row of the topic table")
        return topic.stream.ingest(subject)

    def publishers_of(self, topic: Topic[Any]) -> Sequence[str]:
        """Return the roles that publish a topic."""
        return self._named(topic.publishers)

    def subscribers_of(self, topic: Topic[Any]) -> Sequence[str]:
        """Return the roles that subscribe to a topic: by the topic's row, or by their own."""
        named = self._named(topic.subscribers)
        others = [role.name for role in self.roles if topic.name == role.queue or topic.name in role.subscribes]
        others = [name for name in others if name not in named]
        return [*named, *others] if others else named

    def _named(self, names: Sequence[str]) -> Sequence[str]:
        """Return the roles that a row names: the rows for all roles and for all workers include those of the user."""
        if names is ROLE_NAMES:
            return self.role_names
        return [role.name for role in self.roles if role.kind == "worker"] if names is WORKERS else names


BUILT_IN = Tables(ROLES, STREAMS, TOPICS)
BY_NAME = BUILT_IN.by_name
QUEUES = BUILT_IN.queues
