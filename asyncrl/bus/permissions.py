"""What the server lets each role say and hear: made from the topic table, the work queues and the calls our code makes.

Everybody says and listens through requests whose answers come to an inbox of their own, so that nobody needs more than
the subjects that the table gives to their role. A log is read through a consumer that the reader makes for itself; the
work queues of the run are not touched by that, their names are denied to everybody but the pool they belong to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from asyncrl.bus.address import BusAddress
from asyncrl.bus.provision import QUEUES
from topics.actors import ACTOR_STARTED
from topics.table import TOPICS
from topics.topic import STREAMS, Keep, Stream

OPERATOR = "operator"  # provisions the run and asks things of it
MONITOR = "monitor"  # hears everything and says nothing
WARDEN = "warden"  # watches over the whole run: hears everything, and trims what nobody needs any more
ROLES = (OPERATOR, *ACTOR_STARTED.said_by, MONITOR)


class Permissions(NamedTuple):
    """Subjects as a server's configuration takes them; what is denied is so although a wildcard allows it."""

    publish: list[str]
    denied: list[str]  # of what may be published
    subscribe: list[str]


def user_of(run: str, role: str) -> str:
    """Name of the user that plays a role of a run."""
    return f"{run}-{role}"


def permissions(role: str, run: str) -> Permissions:
    """What one role of a run may do, and nothing else.

    Raises:
        ValueError: no such role.
    """
    if role not in ROLES:
        raise ValueError(f"no role is called {role!r}; roles: {', '.join(ROLES)}")
    inbox = f"{BusAddress('', user_of(run, role)).inbox}.>"
    if role == OPERATOR:
        return Permissions([f"asyncrl.{run}.>", *_everything(run)], [], [inbox, f"asyncrl.{run}.>"])
    watches = role in (WARDEN, MONITOR)
    heard = [topic for topic in TOPICS if watches or role in topic.heard_by or _keeps(role, topic.stream)]
    said = [topic for topic in TOPICS if role in topic.said_by]
    queue = QUEUES.get(role)
    followed = {topic.stream for topic in heard if queue is None or topic is not queue.topic}
    known = {topic.stream for topic in [*heard, *said]}
    publish, denied = [topic.pattern(run) for topic in said], []
    for stream in STREAMS:
        name = stream.full_name(run)
        if stream in known:  # who says something reads back what a repeat met
            publish += [f"$JS.API.{call}.{name}" for call in ("STREAM.INFO", "DIRECT.GET", "STREAM.MSG.GET")]
        if stream in followed:
            publish += [f"$JS.API.CONSUMER.{call}.{name}.*" for call in ("CREATE", "DELETE", "MSG.NEXT")]
            denied += _queue_calls(role, stream, run)
        if role == WARDEN and stream.keep is Keep.PAYLOAD:
            publish.append(f"$JS.API.STREAM.PURGE.{name}")
    if watches:
        publish += [f"$JS.API.CONSUMER.INFO.{queue.stream.full_name(run)}.{queue.name}" for queue in QUEUES.values()]
    if queue is not None:
        pool = f"{queue.stream.full_name(run)}.{queue.name}"
        publish += [f"$JS.API.CONSUMER.MSG.NEXT.{pool}", f"$JS.ACK.{pool}.>", f"$JS.ACK.*.*.{pool}.>"]
    subscribe = [f"asyncrl.{run}.>"] if watches else [topic.pattern(run) for topic in heard]
    return Permissions(publish, denied, [inbox, *subscribe])


def _keeps(role: str, stream: Stream | None) -> bool:
    """Whether it is a role's own log, which it reads back."""
    return stream is not None and stream.keeper == role


def _queue_calls(role: str, stream: Stream, run: str) -> list[str]:
    """What could take work out of a stream's queues, or remove them."""
    calls = []
    for queue in QUEUES.values():
        if queue.stream is stream:
            verbs = ("CREATE", "DELETE") if queue.name == role else ("CREATE", "DELETE", "MSG.NEXT")
            calls += [f"$JS.API.CONSUMER.{verb}.{stream.full_name(run)}.{queue.name}" for verb in verbs]
    return calls


def _everything(run: str) -> list[str]:
    """Every call about the streams of one run, and none about those of another."""
    calls = []
    for stream in STREAMS:
        name = stream.full_name(run)
        calls += [f"$JS.API.STREAM.*.{name}", f"$JS.API.STREAM.MSG.*.{name}"]
        calls += [f"$JS.API.DIRECT.GET.{name}", f"$JS.API.DIRECT.GET.{name}.>"]
        calls += [f"$JS.API.CONSUMER.*.{name}", f"$JS.API.CONSUMER.*.{name}.>"]
        calls += [f"$JS.API.CONSUMER.MSG.NEXT.{name}.*", f"$JS.ACK.{name}.>", f"$JS.ACK.*.*.{name}.>"]
    return calls


def authorization(users: Iterable[tuple[BusAddress, Permissions | None]]) -> str:
    """The `authorization` block of a server's configuration.

    Args:
        users: each with what it may do; None for everything.
    """
    lines = []
    for address, allowed in users:
        line = f"    {{ user: {json.dumps(address.user)}, password: {json.dumps(address.password)}"
        if allowed is not None:
            line += (
                f", permissions: {{\n        publish: {{ allow: {_list(allowed.publish)}, deny: {_list(allowed.denied)}"
                f" }}\n        subscribe: {{ allow: {_list(allowed.subscribe)} }}\n    }}"
            )
        lines.append(f"{line} }}")
    return "authorization {\n  users = [\n" + "\n".join(lines) + "\n  ]\n}\n"


def _list(subjects: list[str]) -> str:
    return json.dumps(subjects)
