"""Permissions of each role: made from the topic table, the work queues and the calls that readers make.

A role publishes its own topics and reads logs through its own consumers, whose messages and answers go to an inbox that
only this role may read. The work queues are closed to all but their own pool.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from asyncrl.bus.address import BusAddress
from asyncrl.bus.layout import DEFAULT, StreamLayout
from topics.actors import ACTOR_STARTED, ACTOR_STOPPED, FLEET_SCALED, VITALS_TAKEN
from topics.alerts import ALERT_ENDED, ALERT_RAISED
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.engines import ENGINE_GONE, ENGINE_READY, ENGINE_UPDATING
from topics.evals import EVAL_SCORED
from topics.roles import MONITOR, OBSERVER, OPERATOR, SUPERVISOR
from topics.runs import RUN_HISTORY, RUN_STATE
from topics.stalls import STALL_ENDED, STALL_FOUND
from topics.table import BUILT_IN, Tables, WorkQueue
from topics.topic import LEDGER_BLOBS, Retention, Stream, Topic
from topics.trajectories import TRAJECTORY_GRADED
from topics.weights import CHECKPOINT_SAVED, TRAINING_FINISHED, WEIGHTS_PUBLISHED

OBSERVED: tuple[Topic[Any], ...] = (
    *(RUN_STATE, RUN_HISTORY, VITALS_TAKEN, BATCH_TRAINED, BATCH_PACKED, EVAL_SCORED, TRAJECTORY_GRADED),
    *(WEIGHTS_PUBLISHED, CHECKPOINT_SAVED, TRAINING_FINISHED, ENGINE_UPDATING, ENGINE_READY, ENGINE_GONE),
    *(ACTOR_STARTED, ACTOR_STOPPED, FLEET_SCALED, STALL_FOUND, STALL_ENDED, ALERT_RAISED, ALERT_ENDED),
)
"""Topics that an observer reads: states, metrics and ids. Their messages hold no texts of tasks and no tokens."""


class Permissions(NamedTuple):
    """Subjects for a server's configuration; denied subjects win over an allowing wildcard."""

    publish: list[str]
    denied: list[str]  # of what may be published
    subscribe: list[str]
    unheard: Sequence[str] = ()  # denied, of what may be subscribed to


def login_roles(tables: Tables = BUILT_IN) -> list[str]:
    """Return all names with a separate login."""
    return [OPERATOR, *tables.role_names, MONITOR, OBSERVER]


def user_of(run: str, role: str) -> str:
    """Return the name of the user for a role of a run."""
    return f"{run}-{role}"


def permissions(
    role: str, runs: Sequence[str], tables: Tables = BUILT_IN, layout: StreamLayout = DEFAULT
) -> Permissions:
    """Return what a role may do in each of some runs, and nothing else; its user has the name of the first run.

    Raises:
        ValueError: no such role.
    """
    if role not in (roles := login_roles(tables)):
        raise ValueError(f"no role is called {role!r}; roles: {', '.join(roles)}")
    allowed, denied = [], []
    for run in runs:
        for stream in tables.streams:
            allowed += _everything(stream, run) if role == OPERATOR else _allowed(tables, role, stream, run)
            denied += [] if role == OPERATOR else _denied(tables, role, stream, run)
    inbox = f"{BusAddress('', user_of(runs[0], role)).inbox}.>"
    return Permissions(layout.with_calls(allowed), layout.with_calls(denied), [inbox])


def of_the_only_run(monitor: Permissions, others: Iterable[BusAddress]) -> Permissions:
    """Extend the permissions of the monitor on a server that holds one run.

    NATS clients ask for the names of streams, and take answers at an inbox without the name of the user.

    Args:
        others: the other users of the server, whose inboxes stay closed.
    """
    calls = [f"$JS.API.{call}" for call in ("INFO", "STREAM.NAMES", "STREAM.LIST")]
    inboxes = [f"{login.inbox}.>" for login in others]
    return monitor._replace(publish=monitor.publish + calls, subscribe=["_INBOX.>"], unheard=inboxes)


def _everything(stream: Stream, run: str) -> list[str]:
    """Every message and every call of one stream."""
    name = stream.full_name(run)
    return [
        stream.ingest(f"asyncrl.{run}.>"),
        *(f"$JS.API.STREAM.*.{name}", f"$JS.API.STREAM.MSG.*.{name}"),
        *(f"$JS.API.DIRECT.GET.{name}", f"$JS.API.DIRECT.GET.{name}.>"),
        *(f"$JS.API.CONSUMER.*.{name}", f"$JS.API.CONSUMER.*.{name}.>", f"$JS.API.CONSUMER.MSG.NEXT.{name}.*"),
        f"$JS.API.CONSUMER.DURABLE.CREATE.{name}.*",
        *(f"$JS.ACK.{name}.>", f"$JS.ACK.*.*.{name}.>", f"$JS.FC.{name}.>"),
    ]


def _allowed(tables: Tables, role: str, stream: Stream, run: str) -> list[str]:
    name = stream.full_name(run)
    published = [topic for topic in tables.topics if topic.stream is stream and role in tables.publishers_of(topic)]
    calls = [stream.ingest(topic.pattern(run)) for topic in published]
    if published or _subscribed(tables, role, stream):  # publishers read back the message that a repeat met
        calls += [f"$JS.API.{call}.{name}" for call in ("STREAM.INFO", "DIRECT.GET", "STREAM.MSG.GET")]
    if role == MONITOR and stream.closed:
        calls += [f"$JS.API.STREAM.INFO.{name}"]  # how full it is
    elif role == MONITOR:
        calls += _of_any_client(tables, stream, run)
    elif role == OBSERVER:
        calls += _of_observer(stream, run)
    elif _follows(tables, role, stream):
        calls += [f"$JS.API.CONSUMER.{call}.{name}.*" for call in ("CREATE", "DELETE", "MSG.NEXT")]
    if role == SUPERVISOR:  # it trims messages that are no longer needed
        calls += [f"$JS.API.CONSUMER.INFO.{name}.{one.name}" for one in _queues(tables, stream)]
        calls += [f"$JS.API.STREAM.PURGE.{name}"] if stream.keep is Retention.PAYLOAD or stream is LEDGER_BLOBS else []
        calls += [f"$JS.API.STREAM.MSG.DELETE.{name}"] if stream.closed else []  # of data keys that are too old
    for queue in [queue for queue in _queues(tables, stream) if queue.role == role]:
        pool = f"{name}.{queue.name}"
        calls += [f"$JS.API.CONSUMER.MSG.NEXT.{pool}", f"$JS.ACK.{pool}.>", f"$JS.ACK.*.*.{pool}.>"]
    return calls


def _of_any_client(tables: Tables, stream: Stream, run: str) -> list[str]:
    """The calls of NATS clients that read a stream: ordered, filtered, pushed or pulled."""
    name = stream.full_name(run)
    calls = [f"$JS.API.CONSUMER.CREATE.{name}.>"]
    calls += [f"$JS.API.CONSUMER.{call}.{name}.*" for call in ("DELETE", "DURABLE.CREATE", "INFO", "MSG.NEXT")]
    calls += [f"$JS.API.DIRECT.GET.{name}.>", f"$JS.ACK.{name}.>", f"$JS.FC.{name}.>"]
    # A request for a consumer without a name may name one in its body, and alter a work queue.
    return calls if _queues(tables, stream) else [f"$JS.API.CONSUMER.CREATE.{name}", *calls]


def _of_observer(stream: Stream, run: str) -> list[str]:
    """The calls that read one topic of a stream, and no other: each through a consumer with that topic as its filter.

    The server refuses a consumer whose filter differs from the one in the subject of the request."""
    name, observed = stream.full_name(run), [topic for topic in OBSERVED if topic.stream is stream]
    calls = [f"$JS.API.CONSUMER.CREATE.{name}.*.{topic.pattern(run)}" for topic in observed]
    verbs = ("CONSUMER.DELETE", "CONSUMER.INFO", "CONSUMER.MSG.NEXT")
    calls += [f"$JS.API.{verb}.{name}.*" for verb in verbs if observed]
    return [*calls, f"$JS.API.STREAM.INFO.{name}"] if observed else []


def _denied(tables: Tables, role: str, stream: Stream, run: str) -> list[str]:
    """Return the calls that could take work from the queues of a stream that a role reads, or change them."""
    calls = []
    reads = role in (MONITOR, OBSERVER) or _follows(tables, role, stream)
    for queue in _queues(tables, stream) if reads else []:
        pool = f"{stream.full_name(run)}.{queue.name}"
        verbs = ("CREATE", "DELETE") if queue.role == role else ("CREATE", "DELETE", "MSG.NEXT")
        calls += [f"$JS.API.CONSUMER.{verb}.{pool}" for verb in verbs]
        if role in (MONITOR, OBSERVER):
            calls += [f"$JS.API.CONSUMER.{call}" for call in (f"CREATE.{pool}.>", f"DURABLE.CREATE.{pool}")]
            calls += [f"$JS.ACK.{pool}.>"]
    return calls


def _queues(tables: Tables, stream: Stream) -> list[WorkQueue]:
    return [queue for queue in tables.queues.values() if queue.stream is stream]


def _subscribed(tables: Tables, role: str, stream: Stream) -> list[Topic[Any]]:
    """The topics of a stream that a role reads; a keeper reads its own log back."""
    everything = role == SUPERVISOR or (role == MONITOR and not stream.closed) or role == stream.keeper
    topics = [topic for topic in tables.topics if topic.stream is stream]
    return [topic for topic in topics if everything or role in tables.subscribers_of(topic)]


def _follows(tables: Tables, role: str, stream: Stream) -> bool:
    """Return whether it reads more of a stream than the work that its queue hands out."""
    worked_off = [queue.topic for queue in tables.queues_of(role)]
    return any(topic not in worked_off for topic in _subscribed(tables, role, stream))


def authorization(users: Iterable[tuple[BusAddress, Permissions | None]]) -> str:
    """The `authorization` block of a server's configuration.

    Args:
        users: each with its permissions; None for everything.
    """
    lines = []
    for address, allowed in users:
        line = f"    {{ user: {json.dumps(address.user)}, password: {json.dumps(address.password)}"
        if allowed is not None:
            publish, denied, subscribe, unheard = map(json.dumps, map(list, allowed))
            line += (
                f", permissions: {{\n        publish: {{ allow: {publish}, deny: {denied} }}\n"
                f"        subscribe: {{ allow: {subscribe}, deny: {unheard} }}\n    }}"
            )
        lines.append(f"{line} }}")
    return "authorization {\n  users = [\n" + "\n".join(lines) + "\n  ]\n}\n"
