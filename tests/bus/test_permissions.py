"""Least permission: what a role may not publish or subscribe to, the server refuses."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import NamedTuple

import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusDenied
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.permissions import OBSERVED, login_roles, permissions
from asyncrl.bus.provision import equal_sizes, provision
from asyncrl.bus.publish import WRITER, publish, unpack
from asyncrl.bus.server import EmbeddedServer
from asyncrl.cli.roles import roles_text
from harness.stage import DEADLINE_S, until
from harness.versions import empty_version
from topics.actors import STOP_REQUESTED, VITALS_TAKEN
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.prompts import PROMPT_ISSUED
from topics.roles import ROLE_NAMES as ACTORS_ON_STAGE
from topics.runs import RUN_STATE
from topics.table import BUILT_IN, QUEUES, TOPICS
from topics.topic import (
    ACTORS,
    BLOBS,
    DEAD,
    ENGINES,
    LEDGER_BLOBS,
    SECRETS,
    SESSIONS,
    STREAMS,
    TRAINING,
    TRAJECTORIES,
    VITALS,
    WEIGHTS,
    Stream,
)
from topics.trajectories import TRAJECTORY_GENERATED
from topics.turns import TURN_FINISHED
from topics.weights import WEIGHTS_OFFERED, WEIGHTS_PUBLISHED, WeightsPublished

RUN = "mine"
EVERYTHING = ("operator", "monitor", "supervisor")  # subscribe to everything
_SUBJECT = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')


class Served(NamedTuple):
    """A server with the users of one run, provisioned by its operator."""

    server: EmbeddedServer
    logins: dict[str, BusAddress]

    async def refused(self, role: str, *, publishes: Iterable[str] = (), listens: Iterable[str] = ()) -> set[str]:
        """Which of these subjects the server refuses a role."""
        publishes, listens = list(publishes), list(listens)
        errors: list[str] = []

        async def on_error(error: Exception) -> None:
            errors.append(str(error))

        login, client = self.logins[role], Client()
        await client.connect(login.url, user=login.user, password=login.password, error_cb=on_error)
        for subject in publishes:
            await client.publish(subject, b"", reply=f"{login.inbox}.answer")
        for subject in listens:
            await client.subscribe(subject)
        for _ in range(2):  # the client's first ping overtakes what waits to be written
            await client.flush(30)
        await client.close()
        original = {subject.lower(): subject for subject in (*publishes, *listens)}  # the client tells in lower case
        return {original[match[2]] for error in errors if (match := _SUBJECT.search(error)) is not None}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    server = EmbeddedServer(tmp_path, run=RUN)
    await server.start()
    logins = {role: BusAddress.read(tmp_path / "credentials" / f"{role}.json") for role in login_roles()}
    operator = await Bus.connect(logins["operator"], RUN)
    await provision(operator, equal_sizes(payload_mb=16, ledger_mb=16), lease_s=5)
    await operator.close()
    try:
        yield Served(server, logins)
    finally:
        await server.stop()


@pytest.fixture
async def login(served: Served):
    opened: list[Bus] = []

    async def login(role: str) -> Bus:
        opened.append(await Bus.connect(served.logins[role], RUN))
        return opened[-1]

    yield login
    for bus in opened:
        await bus.close()


def subject_of(topic) -> str:
    return topic.ingest(RUN, "k" if topic.key else "")


def may_read(role: str, topic) -> bool:
    if role == "monitor" and topic.stream.closed:
        return False
    return role in EVERYTHING or role in (*topic.subscribers, topic.stream.keeper)


def reads(role: str, stream: Stream) -> bool:
    """Return whether a role follows a log by a consumer of its own; work from a queue needs none."""
    worked_off = [queue.topic for queue in BUILT_IN.queues_of(role)]
    return any(may_read(role, topic) for topic in TOPICS if topic.stream is stream and topic not in worked_off)


def knows(role: str, stream: Stream) -> bool:
    """Return whether a role has anything to do with a stream."""
    return any(may_read(role, topic) or role in topic.publishers for topic in TOPICS if topic.stream is stream)


def test_there_is_a_user_for_every_actor_and_three_for_people():
    assert set(login_roles()) == {*ACTORS_ON_STAGE, "operator", "monitor", "observer"}
    with pytest.raises(ValueError, match="no role is called 'stranger'"):
        permissions("stranger", [RUN])


async def test_a_role_publishes_what_the_table_permits_and_nothing_else(served: Served):
    unknown = ACTORS.ingest("asyncrl.mine.unknown.said")
    foreign = {STOP_REQUESTED.ingest("other"), unknown, "_INBOX.mine-learner.stolen", "$SYS.REQ.X"}
    foreign |= {
        topic.subject(RUN, "k" if topic.key else "") for topic in TOPICS
    }  # what is stored, no stream listens to
    for role in login_roles():
        output = {subject_of(topic) for topic in TOPICS if role == "operator" or role in topic.publishers}
        asked = {subject_of(topic) for topic in TOPICS} | foreign

        refused = await served.refused(role, publishes=asked)

        assert refused == asked - output - ({unknown} if role == "operator" else set()), role


async def test_a_role_subscribes_to_its_own_answers_and_to_nothing_that_a_stream_listens_to(served: Served):
    asked = {">", "asyncrl.>", "asyncrl.mine.>", "_INBOX.>", "$JS.>", "_R_.>"}
    asked |= {stream.ingest("asyncrl.mine.>") for stream in STREAMS} | {subject_of(topic) for topic in TOPICS}
    asked |= {topic.pattern(RUN) for topic in TOPICS} | {f"_INBOX.mine-{role}.>" for role in login_roles()}
    for role in login_roles():
        own = {f"_INBOX.mine-{role}.>"} | ({"_INBOX.>"} if role == "monitor" else set())
        assert await served.refused(role, listens=asked) == asked - own, role


async def test_an_answer_to_another_user_does_not_reach_the_monitor(served: Served):
    monitor, heard = Client(), asyncio.Queue[str]()
    login = served.logins["monitor"]
    await monitor.connect(login.url, user=login.user, password=login.password)

    async def hear(message: Msg) -> None:
        heard.put_nowait(message.subject)

    for pattern in ("_INBOX.>", "_INBOX.*.>", "_INBOX.*.*.*"):
        await monitor.subscribe(pattern, cb=hear)
    await monitor.flush(DEADLINE_S)
    for asking in (served.server.address, served.logins["operator"], served.logins["learner"]):
        bus = await Bus.connect(asking, RUN)
        await bus.api(f"STREAM.INFO.{ACTORS.full_name(RUN)}")
        await bus.close()
    await monitor.request("$JS.API.STREAM.NAMES", b"", timeout=DEADLINE_S)  # its own answer
    await monitor.close()

    subjects = {heard.get_nowait() for _ in range(heard.qsize())}
    assert subjects and not [subject for subject in subjects if "mine-" in subject or "asyncrl" in subject]


_OPERATORS = ("CREATE", "UPDATE", "DELETE", "SNAPSHOT", "RESTORE")


def calls(stream: Stream) -> dict[str, str]:
    """Every call of the JetStream API that touches a stream, with who may make it."""
    name = stream.full_name(RUN)
    found = {f"$JS.API.STREAM.{verb}.{name}": "operator" for verb in _OPERATORS}
    found |= {f"$JS.API.STREAM.PURGE.{name}": "trims", f"$JS.API.STREAM.MSG.DELETE.{name}": "erases"}
    found |= {f"$JS.API.{call}.{name}": "knows" for call in ("STREAM.MSG.GET", "DIRECT.GET")}
    found[f"$JS.API.STREAM.INFO.{name}"] = "fills"
    queues = [queue for queue in QUEUES.values() if queue.stream is stream]
    found[f"$JS.API.CONSUMER.CREATE.{name}"] = "operator" if queues else "monitor"  # a consumer that the server names
    found |= {f"$JS.API.CONSUMER.{verb}.{name}.r1": "reads" for verb in ("CREATE", "DELETE", "MSG.NEXT")}
    found |= {f"$JS.API.CONSUMER.{verb}.{name}.r1": "operator" for verb in ("PAUSE", "RESET", "UNPIN")}
    some = f"asyncrl.{RUN}.batch.trained"
    for subject in (f"CONSUMER.CREATE.{name}.r1.{some}", f"CONSUMER.INFO.{name}.r1", f"DIRECT.GET.{name}.{some}"):
        found[f"$JS.API.{subject}"] = "monitor"
    found[f"$JS.API.CONSUMER.DURABLE.CREATE.{name}.r1"] = "monitor"
    found |= {f"$JS.ACK.{name}.r1.1.1.1.1.0": "monitor", f"$JS.FC.{name}.r1.x": "monitor"}
    for queue in queues:
        pool = f"{name}.{queue.name}"
        found |= {f"$JS.API.CONSUMER.{verb}.{pool}": "operator" for verb in ("CREATE", "DELETE", "PAUSE")}
        for subject in (f"CREATE.{pool}.{some}", f"DURABLE.CREATE.{pool}"):
            found[f"$JS.API.CONSUMER.{subject}"] = "operator"
        found |= {f"$JS.API.CONSUMER.MSG.NEXT.{pool}": queue.role, f"$JS.ACK.{pool}.1.1.1.1.0": queue.role}
        found[f"$JS.API.CONSUMER.INFO.{pool}"] = "counts"
    return found


def calls_of_an_observer(stream: Stream) -> set[str]:
    """Calls about consumers of some topics, of those that all roles are asked for."""
    name, topics = stream.full_name(RUN), [topic for topic in OBSERVED if topic.stream is stream]
    found = {f"$JS.API.CONSUMER.{verb}.{name}.r1" for verb in ("DELETE", "INFO", "MSG.NEXT") if topics}
    found |= {f"$JS.API.STREAM.INFO.{name}" for _ in topics[:1]}
    return found | {f"$JS.API.CONSUMER.CREATE.{name}.r1.{BATCH_TRAINED.subject(RUN)}" for _ in topics[:1]} & (
        {f"$JS.API.CONSUMER.CREATE.{name}.r1.{topic.pattern(RUN)}" for topic in topics}
    )


async def test_an_observer_reads_states_and_metrics_but_no_texts_and_no_tokens(served: Served):
    owner, observer = await Bus.connect(served.logins["operator"], RUN), Client()
    login = served.logins["observer"]
    await observer.connect(login.url, user=login.user, password=login.password, inbox_prefix=login.inbox)

    async def make_consumer(stream: Stream, subject: str, **filters: object) -> str:
        """Return the error of the server, or "" """
        name = stream.full_name(RUN)
        config = {"name": "mine", "ack_policy": "none", "mem_storage": True, **filters}
        body = json.dumps({"stream_name": name, "config": config}).encode()
        try:
            answer = await observer.request(f"$JS.API.CONSUMER.CREATE.{name}.mine.{subject}", body, timeout=2)
        except nats.errors.TimeoutError:
            return "not permitted"
        return str(json.loads(answer.data).get("error", {}).get("description", ""))

    try:
        trained, offered = BATCH_TRAINED.subject(RUN), WEIGHTS_OFFERED.pattern(RUN)
        assert await make_consumer(TRAINING, trained, filter_subject=trained) == ""
        assert await make_consumer(TRAINING, trained, filter_subject="asyncrl.mine.eval.requested") != ""
        assert await make_consumer(TRAINING, trained, filter_subjects=["asyncrl.mine.>"]) != ""
        assert await make_consumer(TRAINING, trained) != ""
        state = RUN_STATE.subject(RUN)
        assert await make_consumer(VITALS, state, filter_subject=state) == ""
        assert await make_consumer(VITALS, state, filter_subject=offered) != ""
        assert await make_consumer(VITALS, offered, filter_subject=offered) == "not permitted"
        for topic in (TRAJECTORY_GENERATED, PROMPT_ISSUED, TURN_FINISHED):
            pattern = topic.pattern(RUN)
            assert await make_consumer(topic.stream, pattern, filter_subject=pattern) == "not permitted"
    finally:
        await observer.close()
        await owner.close()


async def test_a_role_asks_the_server_for_what_it_reads_and_changes_no_stream(served: Served):
    for role in set(login_roles()) - {"operator"}:
        listing = {"$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST"}
        allowed, asked = {*listing} if role == "monitor" else set(), {*listing, "$JS.API.STREAM.CREATE.x"}
        for stream in STREAMS:
            may = {role} if role != "monitor" else {"fills"} if stream.closed else {role, "fills"}
            may |= {"fills"} if knows(role, stream) else set()
            may |= {"erases"} if role == "supervisor" and stream.closed else set()
            may |= {"knows"} if knows(role, stream) else set()
            may |= {"reads"} if reads(role, stream) else set()
            counts = role in ("monitor", "supervisor") or (role == "observer" and calls_of_an_observer(stream))
            may |= {"counts"} if counts else set()
            may |= (
                {"trims"} if role == "supervisor" and stream in (TRAJECTORIES, BLOBS, WEIGHTS, LEDGER_BLOBS) else set()
            )
            asked |= calls(stream).keys()
            allowed |= {subject for subject, who in calls(stream).items() if who in may}
            allowed |= calls_of_an_observer(stream) if role == "observer" else set()

        assert await served.refused(role, publishes=asked) == asked - allowed, role


async def test_the_operator_may_do_everything_to_the_runs_streams_and_nothing_to_others(served: Served):
    mine = {subject for stream in STREAMS for subject in calls(stream)}
    foreign = {subject.replace("ASYNCRL_mine_", "ASYNCRL_other_") for subject in mine}

    assert await served.refused("operator", publishes=mine | foreign) == foreign


async def test_the_promises_by_name(served: Served):
    weights, batches = WEIGHTS_PUBLISHED.ingest(RUN), BATCH_PACKED.ingest(RUN)

    assert await served.refused("rollout", publishes=[weights, batches]) == {weights, batches}
    calls = ("$JS.API.", "$JS.ACK.", "$JS.FC.")  # of consumers that it makes for itself
    assert all(subject.startswith(calls) for subject in permissions("monitor", [RUN]).publish)
    text = roles_text([RUN])
    assert all(f"{role}  (user mine-{role})" in text for role in login_roles())
    assert "STREAM.CREATE" not in text.split("prompter  (")[1]


def test_what_listens_in_reads_no_data_keys():
    name = SECRETS.full_name("r1")
    assert [call for call in permissions("monitor", ["r1"]).publish if name in call] == [f"$JS.API.STREAM.INFO.{name}"]
    may_read = [role for role in login_roles() if any(name in call for call in permissions(role, ["r1"]).publish)]
    assert not {"engine", "buffer", "prompter", "sessions", "router"} & {*may_read}


def test_what_faces_the_network_reads_no_decisions_about_turns():
    assert not [call for call in permissions("gateway", ["r1"]).publish if SESSIONS.full_name("r1") in call]


# --- one clear error, at once


async def test_a_denied_publish_is_an_error_of_its_call(login):
    bus = await login("rollout")
    refusal = r"NATS at nats://\S+ does not allow user 'mine-rollout' to {}; what each role may do: asyncrl roles mine"

    async def subscribe(_: object) -> None: ...

    async with asyncio.timeout(DEADLINE_S):  # a call that waits for an answer ends with another error
        with pytest.raises(BusDenied, match=refusal.format(r"publish to _R_\.BATCHES\.asyncrl\.mine\.batch\.packed")):
            await bus.store(BATCH_PACKED.subject(RUN), b"", {})
        with pytest.raises(BusDenied, match=refusal.format(r"publish to \$JS\.API\.STREAM\.DELETE\.ASYNCRL_mine_DEAD")):
            await bus.api("STREAM.DELETE.ASYNCRL_mine_DEAD")
        with pytest.raises(BusDenied, match=refusal.format(r"listen to asyncrl\.mine\.stop\.requested")):
            await bus.subscribe(STOP_REQUESTED.subject(RUN), subscribe)
        with pytest.raises(BusDenied, match=r"CONSUMER\.CREATE\.ASYNCRL_mine_TRAINING"):
            await LogReader(bus, TRAINING, lambda _: None).start()


async def test_a_denied_word_that_nobody_waits_for_is_a_fault_of_the_actor(login):
    bus = await login("monitor")
    received: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    bus.on_fault = received.set_result

    await bus.send(VITALS_TAKEN.ingest(RUN, "monitor-1"))

    async with asyncio.timeout(DEADLINE_S):
        assert isinstance(error := await received, BusDenied)
    subject = VITALS_TAKEN.ingest(RUN, "monitor-1").lower()  # the client's error has it so, and nobody asked for it
    assert f"does not allow user 'mine-monitor' to publish to {subject}" in str(error)


async def test_an_engine_loads_no_weights_from_outside_of_the_runs_store(bus: Bus, stage):
    scene = stage(engine={"kind": "scripted"})
    await scene.start("engine")

    evil = WeightsPublished(0, 0, "ab", "files", str(scene.files.weights / ".." / ".." / "evil"))
    await publish(bus, evil, headers={WRITER: "test"})
    letters: list[Record] = []
    ready: list[Record] = []
    readers = [LogReader(bus, DEAD, letters.append), LogReader(bus, ENGINES, ready.append)]
    for reader in readers:
        await reader.start()
    await until(lambda: bool(letters), "weights from elsewhere are dead letters")
    await publish(bus, empty_version(scene.files, 1), headers={WRITER: "test"})
    await until(lambda: any("engine.ready" in record.subject for record in ready), "the engine has weights")
    for reader in readers:
        await reader.close()

    assert [unpack(record, record.data)[1].version for record in ready if "ready" in record.subject] == [1]
    assert "not in this run's store" in unpack(letters[0], letters[0].data)[1].reason
