"""Bad input of every kind: one clear message, nothing lost, nothing that hangs."""

import asyncio
import importlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.runtime.actor import Context
from asyncrl.bus.acks import MESSAGE_ID
from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusDenied, BusUnreachable, ProvisionError
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.provision import equal_sizes, provision, stream_states
from asyncrl.bus.publish import pack, publish
from asyncrl.bus.server import EmbeddedServer, find_server
from asyncrl.config.load import LoadedConfig
from asyncrl.config.settings import Config
from asyncrl.errors import LaunchError
from asyncrl.ports import Listen, free_port
from asyncrl.run.launch import Launch
from harness.examples import unsealed
from harness.stage import DEADLINE_S, Connect, Stage, provision_leased, until
from topics.actors import FLEET_SCALED, SCALE_REQUESTED, DeadLetter
from topics.engines import ENGINE_READY
from topics.table import BY_NAME, TOPICS
from topics.topic import (
    ACTORS,
    BLOBS,
    DEAD,
    FLEET,
    HISTORY,
    LEDGER_BLOBS,
    SECRETS,
    SESSIONS,
    STREAMS,
    TRAJECTORIES,
    TURNS,
    VITALS,
    WEIGHTS,
    Topic,
)

# --- servers that cannot be used


async def test_a_server_that_is_not_there_is_named():
    address = BusAddress(f"nats://127.0.0.1:{free_port()}")

    with pytest.raises(BusUnreachable, match=rf"NATS at {address.url} did not answer within 0 s .*Connect call failed"):
        await Bus.connect(address, "a-run", deadline_s=0.3)


async def test_a_port_behind_which_something_else_listens_is_named():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    other = await asyncio.start_server(silent, "127.0.0.1", 0)
    address = BusAddress(f"nats://127.0.0.1:{other.sockets[0].getsockname()[1]}")
    async with other:
        with pytest.raises(BusUnreachable, match=f"NATS at {address.url} did not answer"):
            await Bus.connect(address, "a-run", deadline_s=0.3)


@pytest.mark.parametrize(("user", "password"), [("asyncrl", "wrong"), ("stranger", "wrong"), ("", "")])
async def test_a_wrong_password_is_refused_at_once_and_named(server: EmbeddedServer, user: str, password: str):
    address = BusAddress(server.address.url, user, password)

    with pytest.raises(BusDenied, match=r"refused user .* check nats.user and nats.password_file") as error:
        async with asyncio.timeout(DEADLINE_S):
            await Bus.connect(address, "a-run", deadline_s=10 * DEADLINE_S)
    assert (repr(user) if user else "without a name") in str(error.value)
    assert not password or password not in str(error.value)


async def test_a_server_without_jetstream_is_named_with_the_remedy():
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        find_server(), "-a", "127.0.0.1", "-p", str(port), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        bus = await Bus.connect(BusAddress(f"nats://127.0.0.1:{port}"), "a-run")
        with pytest.raises(BusUnreachable, match=r"the NATS server has no JetStream; start it with .*-js"):
            await provision(bus, equal_sizes(payload_mb=1, ledger_mb=1), lease_s=1)
        await bus.close()
    finally:
        process.kill()
        await process.wait()


async def test_a_server_whose_port_is_taken_does_not_start_and_names_the_port(tmp_path: Path):
    port = free_port()
    server = EmbeddedServer(tmp_path, listen=Listen("127.0.0.1", port))  # one that nobody named would be another
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()

        with pytest.raises(
            BusUnreachable, match=rf"nats-server on port {port} did not start: .*address already in use"
        ):
            await server.start()
    assert server.process is not None
    assert server.process.returncode is not None

    await server.start()  # the port is free again: the same server, the same address
    await server.stop()


async def test_a_server_with_a_broken_store_names_the_fault(tmp_path: Path):
    (tmp_path / "nats").write_text("a file where a folder is needed")

    with pytest.raises(BusUnreachable, match=r"did not start: .+"):
        await EmbeddedServer(tmp_path).start()


# --- runs that are there already


async def test_a_stream_with_other_settings_is_named_with_the_difference(bus: Bus):
    name = TRAJECTORIES.full_name(bus.run)
    config = (await bus.api(f"STREAM.INFO.{name}"))["config"]
    await bus.api(f"STREAM.UPDATE.{name}", {**config, "discard": "old"})

    with pytest.raises(ProvisionError) as error:
        await provision_leased(bus, 1)

    assert str(error.value) == (
        f"stream {name} is already there with other settings: discard is 'old', expected 'new'; choose another run "
        "id, or delete that stream if it is not needed"
    )


async def test_provisioning_the_same_run_again_changes_nothing(bus: Bus):
    await provision_leased(bus, 1)

    assert set(await stream_states(bus)) == {stream.name for stream in STREAMS}


async def test_a_stream_of_somebody_else_that_takes_our_subjects_is_named(connect: Connect):
    bus = await connect(f"t-{secrets.token_hex(4)}")
    await bus.api("STREAM.CREATE.GREEDY", {"name": "GREEDY", "subjects": [f"_R_.*.asyncrl.{bus.run}.>"]})

    with pytest.raises(ProvisionError, match="PROMPTS could not be made: subjects overlap with an existing stream"):
        await provision(bus, equal_sizes(payload_mb=1, ledger_mb=1), lease_s=1)


def launch(directory: Path, **tables: object) -> Launch:
    config = msgspec.convert({"run": "demo", "directory": str(directory), **tables}, Config)
    return Launch(LoadedConfig(config, directory, directory / "demo.toml"))


async def test_a_run_that_is_running_is_not_started_twice(tmp_path: Path):
    first = launch(tmp_path / "runs")
    first.prepare()

    with pytest.raises(
        LaunchError, match=r"run demo is already running in .*demo; .*asyncrl down demo.*--set run=NAME"
    ):
        launch(tmp_path / "runs").prepare()

    await first.stop()
    second = launch(tmp_path / "runs")
    second.prepare()
    assert second.config.run == "demo-2"
    assert second.files.read_config().run == "demo-2"
    await second.stop()


async def test_of_many_that_start_one_run_at_the_same_moment_exactly_one_does(tmp_path: Path):
    several = [launch(tmp_path / "runs") for _ in range(8)]

    def prepare(one: Launch) -> str:
        try:
            one.prepare()
        except LaunchError as error:
            return str(error)
        return "started"

    with ThreadPoolExecutor(8) as threads:
        output = list(threads.map(prepare, several))

    assert output.count("started") == 1
    assert all(text.startswith(("started", "run demo is already running")) for text in output)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["demo"]
    for one in several:
        await one.stop()


async def test_a_run_id_that_a_shared_server_knows_already_is_refused(bus: Bus, server: EmbeddedServer, tmp_path: Path):
    (tmp_path / "password").write_text(server.address.password)
    nats = {"url": server.address.url, "user": server.address.user, "password_file": str(tmp_path / "password")}
    one = launch(tmp_path / "runs", run=bus.run, nats=nats, model={"path": "unused"})
    one.prepare()

    with pytest.raises(LaunchError, match=f"already holds a run called {bus.run}; .*--set run=NAME"):
        await one.start()
    await one.stop()


# --- messages that are not what they should be

ROLES = ("engine", "prompter", "buffer", "learner", "rollout", "reward", "recorder")
# Read by reference, by people, by the supervisor, who is not here, and by what a gateway needs.
UNREAD_STREAMS = {BLOBS, LEDGER_BLOBS, WEIGHTS, VITALS, DEAD, ACTORS, FLEET, HISTORY, TURNS, SESSIONS, SECRETS}
UNREAD = {
    "trajectory.progressed",
    "progress.stored",
    "prompter.heartbeat",
    "group.completed",
    "group.graded",
}  # when work is resumed; headers alone; by workers of group rewards, whom these settings do not start
FOLLOWED = [topic for topic in TOPICS if topic.stream not in UNREAD_STREAMS and topic.name not in UNREAD]
STEPS = 12


class Play:
    """A small config inside the test: every actor's own code, each on a connection of its own."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.contexts: dict[str, Context] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, connect: Connect) -> None:
        for role in ROLES:
            bus = await connect(self.stage.config.run)
            context = self.contexts[role] = self.stage.context(role, bus)
            bus.on_fault = context.fail
            main = importlib.import_module(f"actors.{role}.actor").main
            self.tasks[role] = asyncio.create_task(main(context))

    async def trained(self) -> None:
        """Wait for the last step; any other actor that ends before is a failure."""
        await asyncio.wait(self.tasks.values(), timeout=120, return_when=asyncio.FIRST_COMPLETED)
        ended = {role: task.exception() for role, task in self.tasks.items() if task.done()}
        faults = {role: context.faults for role, context in self.contexts.items() if context.faults}
        vitals = {role: context.vitals for role, context in self.contexts.items()}
        assert (ended, faults) == ({"learner": None}, {}), vitals

    async def stop(self) -> None:
        for role in reversed(ROLES):
            self.contexts[role].stop.set()
            await asyncio.wait({self.tasks[role]}, timeout=120)
            self.tasks[role].cancel()

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.stage.files.root / "summary.json").read_text())
        return found


@pytest.fixture
async def play(stage: Callable[..., Stage], connect: Connect) -> AsyncIterator[Play]:
    """A small config with a scripted engine and trainer, playing."""
    made = stage(
        task={"options": {"letters": 4}},
        engine={"kind": "scripted", "scripted_tokens": 4},
        learner={"trainer": "scripted", "steps": STEPS, "scripted_step_s": 0.05},
        rollout={"group_size": 2, "slots": 16},
        buffer={"batch_groups": 2, "group_deadline_s": 2.0},
        recorder={"plot": False},
    )
    made.make_model()
    play = Play(made)
    await play.start(connect)
    yield play
    await play.stop()


async def letters_of(bus: Bus) -> dict[tuple[str, int], DeadLetter]:
    records: list[Record] = []
    reader = LogReader(bus, DEAD, records.append)
    await reader.start()
    await asyncio.wait_for(reader.caught_up.wait(), 120)
    await reader.close()
    kept = [record for record in records if "from" not in record.headers]  # the stranger wrote here as well
    letters = [msgspec.msgpack.decode(record.data, type=DeadLetter) for record in kept]
    return {(letter.stream, letter.sequence): letter for letter in letters}


async def begun(play: Play) -> None:
    await until(lambda: play.contexts["learner"].vitals.get("step", 0) >= 1, "the first step")


def subject(topic: Topic[Any], run: str) -> str:
    return topic.subject(run, "nobody-0" if topic.key else "")


async def test_garbage_on_every_topic_becomes_dead_letters_and_the_run_goes_on(play: Play, bus: Bus):
    await begun(play)
    output: dict[tuple[str, int], bytes] = {}

    async def publish_garbage(topic: Topic[Any], garbage: bytes) -> None:
        sequence = (await bus.store(subject(topic, bus.run), garbage, {"from": "a stranger"})).seq
        if topic in FOLLOWED:
            output[topic.stream.name, sequence] = garbage

    words = (b"garbage \xc1", msgspec.msgpack.encode({"v": "one", "trajectory_id": [], "step": {}}))
    # At once: the learner, who is to read them, leaves after its last step.
    await asyncio.gather(*(publish_garbage(topic, garbage) for garbage in words for topic in TOPICS))

    await play.trained()
    await until(lambda: has_letters(bus, output.keys()), "a dead letter for each")
    letters = await letters_of(bus)
    for place, garbage in output.items():
        assert letters[place].body in (garbage, b"")  # nothing where the reader asked for headers only
        assert letters[place].headers["from"] == "a stranger"
        assert letters[place].reason
    await play.stop()
    assert play.summary()["steps"] == STEPS
    assert play.summary()["trajectories_trained"] == STEPS * 4


async def has_letters(bus: Bus, places: Any) -> bool:
    return set(places) <= set(await letters_of(bus))


@pytest.mark.parametrize("name", ["batch.trained", "batch.packed", "prompt.issued"])
async def test_garbage_that_never_stops_on_a_keepers_log_costs_no_message(play: Play, bus: Bus, name: str):
    topic = BY_NAME[name]

    async def disturb() -> None:
        while True:
            await bus.store(subject(topic, bus.run), b"garbage", {"from": "a stranger"})
            await asyncio.sleep(0.002)

    disturbing = asyncio.create_task(disturb())
    await play.trained()
    disturbing.cancel()

    await play.stop()
    summary = play.summary()
    assert (summary["steps"], summary["trajectories_trained"]) == (STEPS, STEPS * 4)
    # The stranger's subject is one more that was issued on.
    issued = STEPS * 4 + sum(summary["dropped_trajectories_by_reason"].values())
    assert summary["trajectories_issued"] in (issued, issued + 1), summary


FORGED = [topic for topic in FOLLOWED if not topic.stream.keeper]


@pytest.mark.parametrize("topic", FORGED, ids=lambda topic: topic.name)
async def test_a_readable_message_about_something_that_never_was_changes_nothing(
    play: Play, bus: Bus, topic: Topic[Any]
):
    message = unsealed(topic.message)
    if topic is ENGINE_READY:
        message.address = f"http://127.0.0.1:{free_port()}"  # an engine that does not answer
    await begun(play)

    await publish(bus, message, topic=topic)
    if topic.key:
        await bus.store(topic.subject(bus.run, "nobody-0"), pack(message, topic), {MESSAGE_ID: "under another name"})

    await play.trained()
    await play.stop()
    summary = play.summary()
    assert (summary["steps"], summary["trajectories_trained"]) == (STEPS, STEPS * 4)


@pytest.mark.slow
async def test_a_whole_run_of_processes_survives_garbage_on_the_supervisors_topics(
    bus: Bus, stage: Callable[..., Stage]
):
    made = stage(
        task={"options": {"letters": 4}},
        engine={"kind": "scripted", "scripted_tokens": 4},
        learner={"trainer": "scripted", "steps": STEPS, "scripted_step_s": 0.05},
        rollout={"group_size": 2, "slots": 16},
        buffer={"batch_groups": 2},
        recorder={"plot": False},
    )
    made.make_model()
    supervisor = await made.start("supervisor")
    await until(lambda: has_messages(bus, "FLEET", 2), "the supervisor has claimed and scaled")

    output = set()
    for topic in (SCALE_REQUESTED, FLEET_SCALED):
        for garbage in (b"garbage", msgspec.msgpack.encode({"wanted": "many"})):
            ack = await bus.store(subject(topic, bus.run), garbage, {"from": "a stranger"})
            output.add((topic.stream.name, ack.seq))

    assert await asyncio.wait_for(supervisor.wait(), 120) == 0
    assert output <= set(await letters_of(bus))
    summary = json.loads((made.files.root / "summary.json").read_text())
    assert (summary["steps"], summary["trajectories_trained"]) == (STEPS, STEPS * 4)


async def has_messages(bus: Bus, stream: str, count: int) -> bool:
    return int((await stream_states(bus))[stream]["messages"]) >= count
