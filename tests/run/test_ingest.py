"""Isolation: whatever a role asks of the server, only its own messages get into a log, and nothing of others changes.

A server sends its answers, and what a push consumer delivers, wherever the asker says, whatever the asker may publish.
"""

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from nats.aio.client import Client

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_message
from asyncrl.bus.permissions import login_roles
from asyncrl.bus.provision import equal_sizes, provision
from asyncrl.bus.server import EmbeddedServer
from topics.secrets import SECRET_MADE
from topics.table import BUILT_IN, QUEUES, TOPICS
from topics.topic import STREAMS, Stream, Topic

RUN = "mine"
DEADLINE_S = 60.0
_REFUSED = re.compile(r'permissions violation for publish to "([^"]+)"')


class Request(NamedTuple):
    """One call of the server, or one publish."""

    subject: str
    body: bytes = b""
    headers: dict[str, str] | None = None


class Account:
    """A role's own connection, with nothing of ours between it and the server."""

    def __init__(self, login: BusAddress) -> None:
        self.login = login
        self.client = Client()
        self.errors: list[str] = []
        self._count = 0

    async def open(self) -> "Account":
        async def on_error(error: Exception) -> None:
            self.errors.append(str(error))

        login = self.login
        await self.client.connect(login.url, user=login.user, password=login.password, error_cb=on_error)
        return self

    async def send(self, requests: list[Request], reply: str) -> None:
        for request in requests:
            await self.client.publish(request.subject, request.body, reply=reply, headers=request.headers)
        for _ in range(2):  # the first ping overtakes what waits to be written
            await self.client.flush(DEADLINE_S)

    async def allowed(self, requests: list[Request]) -> list[Request]:
        """Those that the server does not refuse."""
        self.errors.clear()
        await self.send(requests, f"{self.login.inbox}.answer")
        refused = {match[1] for error in self.errors if (match := _REFUSED.search(error)) is not None}
        return [request for request in requests if request.subject.lower() not in refused]

    async def delivered(self, stream: Stream) -> None:
        """Wait until a push consumer made now has delivered to the role's own inbox: others made before had time."""
        self._count += 1
        inbox, name = f"{self.login.inbox}.d{self._count}", f"d{self._count}"
        there = await self.client.subscribe(inbox)
        await self.send([consumer(stream, name, deliver_subject=inbox)], f"{self.login.inbox}.answer")
        await there.next_msg(DEADLINE_S)
        await there.unsubscribe()


def consumer(stream: Stream, name: str, *, tail: str = "", **config: Any) -> Request:
    """A request for a consumer; with an empty name one that the server names."""
    full = stream.full_name(RUN)
    named = {"name": name} if name else {}
    body = {"stream_name": full, "config": {"ack_policy": "none", "deliver_policy": "all", **named, **config}}
    return Request(f"$JS.API.CONSUMER.CREATE.{full}{'.' if name else ''}{name}{tail}", json.dumps(body).encode())


def reads(stream: Stream) -> Iterator[Request]:
    """Every call whose answer says something of a stream."""
    name = stream.full_name(RUN)
    for subject in ("INFO", "STREAM.NAMES", "STREAM.LIST", f"STREAM.INFO.{name}", f"CONSUMER.LIST.{name}"):
        yield Request(f"$JS.API.{subject}")
    yield Request(f"$JS.API.CONSUMER.NAMES.{name}")
    for query in (b'{"seq":1}', b'{"last_by_subj":">"}', b'{"multi_last":[">"]}', b'{"seq":1,"batch":9}'):
        yield Request(f"$JS.API.DIRECT.GET.{name}", query)
    yield Request(f"$JS.API.STREAM.MSG.GET.{name}", b'{"seq":1}')
    for topic in TOPICS:
        if topic.stream is stream:
            yield Request(f"$JS.API.DIRECT.GET.{name}.{_stored_as(topic)}")
    for queue in QUEUES.values():
        if queue.stream is stream:
            yield Request(f"$JS.API.CONSUMER.INFO.{name}.{queue.name}")
            yield Request(f"$JS.API.CONSUMER.MSG.NEXT.{name}.{queue.name}", b'{"batch":1,"no_wait":true}')
            yield Request(f"$JS.ACK.{name}.{queue.name}.1.1.1.1.0", b"+NXT")


def consumer_calls(stream: Stream, aim: str, mark: str) -> Iterator[Request]:
    """Every call about consumers of a stream: pulled to where the answer goes, or pushed to `aim`."""
    name = stream.full_name(RUN)
    yield consumer(stream, f"pull{mark}")
    yield Request(f"$JS.API.CONSUMER.MSG.NEXT.{name}.pull{mark}", b'{"batch":5,"no_wait":true}')
    yield Request(f"$JS.API.CONSUMER.MSG.NEXT.{name}.pull{mark}", b'{"batch":5,"expires":200000000}')
    yield consumer(stream, f"push{mark}", deliver_subject=aim)
    yield consumer(stream, f"heads{mark}", deliver_subject=aim, headers_only=True, idle_heartbeat=100_000_000)
    yield consumer(stream, "", deliver_subject=aim)
    subject = f"asyncrl.{RUN}.>"
    yield consumer(stream, f"some{mark}", tail=f".{subject}", filter_subject=subject, deliver_subject=aim)
    durable = {"stream_name": name, "config": {"durable_name": f"old{mark}", "deliver_subject": aim}}
    yield Request(f"$JS.API.CONSUMER.DURABLE.CREATE.{name}.old{mark}", json.dumps(durable).encode())
    for verb in ("INFO", "PAUSE", "RESET", "UNPIN", "LEADER.STEPDOWN", "DELETE"):
        yield Request(f"$JS.API.CONSUMER.{verb}.{name}.pull{mark}")


def changes(stream: Stream) -> Iterator[Request]:
    """Every call that would change a stream or a work queue."""
    name = stream.full_name(RUN)
    config = json.dumps({"name": name, "subjects": ["taken.>"]}).encode()
    yield Request(f"$JS.API.STREAM.CREATE.{name}", config)
    yield Request(f"$JS.API.STREAM.CREATE.{name}2", config.replace(name.encode(), f"{name}2".encode()))
    yield Request(f"$JS.API.STREAM.UPDATE.{name}", config)
    for verb in ("DELETE", "SNAPSHOT", "RESTORE", "LEADER.STEPDOWN", "PEER.REMOVE", "PEER.EVACUATE"):
        yield Request(f"$JS.API.STREAM.{verb}.{name}")
    yield Request(f"$JS.API.STREAM.MSG.DELETE.{name}", b'{"seq":1}')
    for queue in QUEUES.values():
        if queue.stream is stream:
            altered = {"ack_policy": "explicit", "filter_subject": queue.topic.pattern(RUN), "max_deliver": 1}
            yield consumer(stream, queue.name, durable_name=queue.name, **altered)
            yield consumer(stream, queue.name, tail=f".{queue.topic.pattern(RUN)}", **altered)
            unnamed = consumer(stream, queue.name, **altered)
            yield unnamed._replace(subject=f"$JS.API.CONSUMER.CREATE.{name}")  # its body names the queue
            durable = consumer(stream, queue.name, durable_name=queue.name, **altered)
            for other in (queue.name, "other"):  # its body names the queue
                yield durable._replace(subject=f"$JS.API.CONSUMER.DURABLE.CREATE.{name}.{other}")
            for verb in ("DELETE", "PAUSE", "RESET", "UNPIN"):
                yield Request(f"$JS.API.CONSUMER.{verb}.{name}.{queue.name}")


KEY = "p000001-0"


def _stored_as(topic: Topic[Any]) -> str:
    return topic.subject(RUN, KEY if topic.key else "")


def _published_to(topic: Topic[Any]) -> str:
    return topic.ingest(RUN, KEY if topic.key else "")


FIRST = {topic.stream: topic for topic in reversed(TOPICS)}  # a topic of each stream
AIMS = [aim for topic in FIRST.values() for aim in (_stored_as(topic), _published_to(topic))]


def own(role: str, headers: dict[str, str] | None = None) -> list[Request]:
    """One message on each topic that a role says."""
    output = [topic for topic in TOPICS if role in topic.publishers]
    return [Request(_published_to(topic), b"mine", headers) for topic in output]


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    """Return the folder with a server's credentials; every stream holds a message on each of its topics."""
    server = EmbeddedServer(tmp_path, run=RUN)
    address = await server.start()
    owner = await Bus.connect(address, RUN)
    await provision(owner, equal_sizes(payload_mb=16, ledger_mb=16), lease_s=5)
    for topic in TOPICS:
        await owner.store(_stored_as(topic), b'{"batch":9}', {"Nats-Msg-Id": topic.name})
    # The supervisor may erase keys: the first one is gone when its other calls are made.
    await owner.store(SECRET_MADE.subject(RUN, "another"), b'{"batch":9}', {"Nats-Msg-Id": "another"})
    await owner.close()
    try:
        yield tmp_path / "credentials"
    finally:
        server.kill()  # with thousands of consumers it takes its time to stop
        await server.ended()


async def last_sequences(bus: Bus) -> dict[str, int]:
    infos = {stream.name: await bus.api(f"STREAM.INFO.{stream.full_name(RUN)}") for stream in STREAMS}
    return {name: info["state"]["last_seq"] for name, info in infos.items()}


async def configurations(bus: Bus) -> list[Any]:
    """Of all streams and work queues."""
    streams = [(await bus.api(f"STREAM.INFO.{stream.full_name(RUN)}"))["config"] for stream in STREAMS]
    names = [f"{queue.stream.full_name(RUN)}.{queue.name}" for queue in QUEUES.values()]
    return [*streams, *[(await bus.api(f"CONSUMER.INFO.{name}"))["config"] for name in names]]


@pytest.mark.parametrize("role", [role for role in login_roles() if role != "operator"])
async def test_a_role_gets_nothing_into_a_log_but_what_it_may_publish(role: str, folder: Path):
    bus = await Bus.connect(BusAddress.read(folder / "operator.json"), RUN)
    account = await Account(BusAddress.read(folder / f"{role}.json")).open()
    before, configured = await last_sequences(bus), await configurations(bus)

    requests = [*(request for stream in STREAMS for request in (*reads(stream), *changes(stream)))]
    answered = await account.allowed(requests)
    readable = [
        stream for stream in STREAMS if await account.allowed([consumer(stream, "probe", deliver_subject="nowhere")])
    ]
    for number, aim in enumerate(AIMS):
        await account.send(answered, aim)
        await account.send([call for stream in readable for call in consumer_calls(stream, aim, str(number))], aim)
        await account.send(own(role), aim)
        if not any(role in topic.publishers and aim == _published_to(topic) for topic in TOPICS):
            await account.send(own(role, {"Nats-Trace-Dest": aim}), f"{account.login.inbox}.answer")
    for stream in readable:
        await account.delivered(stream)
    await account.client.close()

    after = await last_sequences(bus)
    for stream in STREAMS:
        # With the reply subjects that it may use, each of its messages is stored once, and nothing beside them.
        output = [topic for topic in TOPICS if topic.stream is stream and role in topic.publishers]
        sent = len(output) * len([aim for aim in AIMS if BUILT_IN.topic_of(aim) is not None])
        assert after[stream.name] - before[stream.name] == sent, stream.name
        new = range(before[stream.name] + 1, after[stream.name] + 1)
        records = [await read_message(bus, stream, sequence) for sequence in new]
        assert {record.subject for record in records if record is not None} <= {_stored_as(topic) for topic in output}
    assert await configurations(bus) == configured
    await bus.close()
