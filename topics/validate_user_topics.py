"""Check the rows of users' actors against the tables and against each other, before they are added."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, get_args, get_type_hints

from topics.actors import MOST_PROCESSES, SHARED_TYPES, keeper_topics
from topics.roles import MONITOR, OBSERVER, OPERATOR, ROLE_NAMES, Role
from topics.table import BY_NAME, TOPICS
from topics.topic import STREAMS, Retention, Stream, Topic
from topics.wire import Headers, Message, prepare

_LOGINS = (OPERATOR, MONITOR, OBSERVER)  # log in as roles do, and are no actors
_KINDS = get_args(get_type_hints(Role)["kind"])


class Rows(NamedTuple):
    """The rows of one actor."""

    role: Role
    topics: Sequence[Topic[Any]]

    @property
    def streams(self) -> list[Stream]:
        """Its streams that are not in the table: by identity, as readers compare them."""
        found = {id(topic.stream): topic.stream for topic in self.topics}
        return [stream for stream in found.values() if not any(stream is known for known in STREAMS)]

    @property
    def all_topics(self) -> list[Topic[Any]]:
        """Its topics, and those that follow from a keeper's stream."""
        return [*self.topics, *chain.from_iterable(map(keeper_topics, self.streams))]


def shape_problem(rows: Rows) -> str:
    """Describe an invalid list of topics; empty if it is valid."""
    given: object = rows.topics
    if not isinstance(given, list | tuple):
        return f"its TOPICS are {_shown(given)}; expected a list of asyncrl.Topic"
    for topic in rows.topics:
        if found := _shape_of(topic):
            return found
    return ""


def problem(rows: Rows, others: Sequence[Rows]) -> str:
    """Describe the first fault in the rows of an actor; empty without faults.

    Args:
        rows: without a `shape_problem`.
        others: the rows of other actors that are added with it, as whole."""
    return next(chain(_of_role(rows, others), _of_streams(rows, others), _of_topics(rows, others)), "")


def _shown(value: object) -> str:
    return value.__name__ if isinstance(value, type) else f"{type(value).__name__} {value!r}"[:120]


def _shape_of(topic: object) -> str:
    """Describe an invalid topic or part of a topic."""
    if not isinstance(topic, Topic):
        return f"its TOPICS have {_shown(topic)}; expected asyncrl.Topic(MESSAGE, STREAM, [ROLE], [...])"
    kind: object = topic.message
    if not (isinstance(kind, type) and issubclass(kind, Message)):
        return f"topic {topic.name}: its message is {_shown(kind)}; expected a class derived from asyncrl.Message"
    stream: object = topic.stream
    if not isinstance(stream, Stream):
        return f"topic {topic.name}: its stream is {_shown(stream)}; expected an asyncrl.Stream"
    for name in ("publishers", "subscribers", "id"):
        value = getattr(topic, name)
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            return f"topic {topic.name}: its {name} are {_shown(value)}; expected a list or tuple of names"
    return ""


def _of_role(rows: Rows, others: Sequence[Rows]) -> Iterator[str]:
    role = rows.role
    taken = [*ROLE_NAMES, *_LOGINS, *(other.role.name for other in others)]
    if not re.fullmatch(r"[a-z]{1,32}", str(role.name)) or role.name in taken:
        yield f"{role.name!r} is no name for a role: it takes letters a to z, and is not one of {', '.join(taken)}"
    yield from _of_values(role)
    named: object = role.subscribes
    if not isinstance(named, list | tuple):
        yield f"role {role.name}: subscribes is {named!r}; expected a tuple of topics: ({named!r},)"
    names = {topic.name for other in (rows, *others) for topic in other.all_topics}
    for name in (*role.subscribes, *filter(None, [role.queue])):
        if name not in BY_NAME and name not in names:
            yield f"{role.name} subscribes to {name}, which is no topic"


def _of_values(role: Role) -> Iterator[str]:
    if role.kind not in _KINDS:
        yield f"role {role.name}: its kind is {role.kind!r}; expected one of {', '.join(_KINDS)}"
    if type(role.stops) is not int or not 1 <= role.stops <= 5:
        yield f"role {role.name}: stops is {role.stops!r}; expected a phase, 1 to 5"
    if type(role.processes) is not int or not 0 <= role.processes <= MOST_PROCESSES:
        yield f"role {role.name}: processes is {role.processes!r}; expected 0 to {MOST_PROCESSES}"
    if role.setting:
        yield f"role {role.name}: setting is {role.setting!r}, and settings are of asyncrl's roles; give processes"
    if role.scalable and role.kind == "keeper":
        yield f"role {role.name}: a keeper is one process, with a spare; leave `scalable` out"
    if role.kind == "worker" and not role.queue:
        yield f"role {role.name}: a worker has a queue: the topic that its processes share, queue='trajectory.graded'"


def _of_streams(rows: Rows, others: Sequence[Rows]) -> Iterator[str]:
    role = rows.role
    all_streams = {id(stream): stream for stream in chain(STREAMS, *(one.streams for one in (rows, *others)))}
    taken = Counter(stream.name for stream in all_streams.values())
    for stream in rows.streams:
        if [own.name for own in rows.streams].count(stream.name) > 1:
            yield f"stream {stream.name} is made twice; make it once, and give it to each of its topics"
        if not re.fullmatch(r"[A-Z_]{1,32}", stream.name) or taken[stream.name] > 1:
            yield f"{stream.name!r} is no name for a stream: it takes letters A to Z and _, and is not there already"
        if stream.keeper not in ("", role.name):
            yield f"stream {stream.name} is kept by {stream.keeper!r}, which is not this actor"
        if stream.keeper and role.kind != "keeper":
            yield f"stream {stream.name} has a keeper, and role {role.name} is a {role.kind}: leave `keeper` out"
    yield from _of_log(rows)


def _of_log(rows: Rows) -> Iterator[str]:
    role, kept = rows.role, [stream for stream in rows.streams if stream.keeper]
    if role.kind == "keeper" and (len(kept) != 1 or kept[0].keep is not Retention.LEDGER):
        found = ", ".join(f"{stream.name} ({stream.keep.name})" for stream in kept) or "none"
        expected = f"one Stream with Retention.LEDGER and keeper={role.name!r}, its log"
        yield f"role {role.name}: the streams that it keeps are {found}; expected {expected}"


def _of_topics(rows: Rows, others: Sequence[Rows]) -> Iterator[str]:
    role = rows.role
    added = [topic for one in (rows, *others) for topic in one.all_topics]
    names = Counter(topic.name for topic in added)
    types = Counter(topic.message for topic in added if topic.message not in SHARED_TYPES)
    own_types = {topic.message: topic.name for topic in TOPICS}
    headers = {topic.message.HEADERS for topic in TOPICS} - {Headers}
    for topic in rows.all_topics:
        if not re.fullmatch(r"[a-z]+\.[a-z]+", topic.name) or topic.name in BY_NAME or names[topic.name] > 1:
            yield f"{topic.name!r} is no new NOUN.PARTICIPLE: give its message such a name, or set `name`"
        if list(topic.publishers) != [role.name] or topic.stream.keeper not in ("", role.name):
            yield f"topic {topic.name} must be published by {role.name}, on a stream that it may write"
    readers = [*ROLE_NAMES, *_LOGINS, *(one.role.name for one in (rows, *others))]
    for topic in rows.topics:
        kind = topic.message
        if kind in own_types or types[kind] > 1:
            other = own_types.get(kind, "another of these topics")
            yield f"topic {topic.name}: its message {kind.__name__} is that of {other}; give it a separate type"
        if kind.HEADERS in headers:
            remedy = "derive it from asyncrl.Message"
            yield f"topic {topic.name}: {kind.__name__} has the {kind.HEADERS.__name__} of another type; {remedy}"
        yield from _of_fields(topic, readers)


def _of_fields(topic: Topic[Any], readers: Sequence[str]) -> Iterator[str]:
    kind = topic.message
    if strangers := [name for name in topic.subscribers if name not in readers]:
        yield f"topic {topic.name}: its subscriber {strangers[0]!r} is no role; there are {', '.join(readers)}"
    missing = [name for name in (topic.key, *topic.id) if name and not hasattr(kind, name)]
    if missing:
        fields = ", ".join(kind.__struct_fields__)
        yield f"topic {topic.name}: {kind.__name__} has no field {missing[0]!r} for its key or id; it has {fields}"
    yield from _type_problem(topic)


def _type_problem(topic: Topic[Any]) -> Iterator[str]:
    try:
        prepare(topic.message)
    except (TypeError, NameError, ValueError, RuntimeError) as error:
        yield f"topic {topic.name}: {topic.message.__name__} cannot be read from the wire: {error}"
