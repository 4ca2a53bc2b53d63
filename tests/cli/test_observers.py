"""Other people's NATS clients read a run's logs with the monitor's login: ordered, filtered, from any message on."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.provision import equal_sizes, provision
from asyncrl.bus.publish import pack
from asyncrl.bus.server import EmbeddedServer
from harness.examples import example
from harness.pages import written
from topics.batches import BATCH_TRAINED, BatchTrained
from topics.table import QUEUES
from topics.topic import GRADES, PROMPTS, SECRETS, STREAMS, TRAINING, Topic
from topics.trajectories import TRAJECTORY_GRADED
from topics.weights import WEIGHTS_PUBLISHED
from topics.wire import Message

RUN = "mine"
DEADLINE_S = 60.0
NODE = Path(__file__).parents[1] / "node" / "package.json"


class Watched:
    """A server with a run's logs, and the monitor's login."""

    def __init__(self, folder: Path, owner: Bus) -> None:
        self.file = folder / "credentials" / "monitor.json"
        self.owner = owner
        self._count = 0

    async def store(self, topic: Topic[Message], message: Message, key: str = "") -> int:
        self._count += 1
        body, id = pack(message, topic), {"Nats-Msg-Id": str(self._count)}
        return (await self.owner.store(topic.subject(RUN, key), body, id)).seq

    async def train(self, step: int) -> int:
        trained: BatchTrained = example(BatchTrained)
        trained.step, trained.rewards = step, [step / 4]
        return await self.store(BATCH_TRAINED, trained)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    server = EmbeddedServer(tmp_path, run=RUN)
    owner = await Bus.connect(await server.start(), RUN)
    try:
        await provision(owner, equal_sizes(payload_mb=16, ledger_mb=16), lease_s=5)
        watched = Watched(tmp_path, owner)
        for step in (1, 2, 3):
            await watched.train(step)
            await watched.store(WEIGHTS_PUBLISHED, example(WEIGHTS_PUBLISHED.message))
            for key in ("p000001-0", f"p00000{step}-1"):
                await watched.store(TRAJECTORY_GRADED, example(TRAJECTORY_GRADED.message), key)
        yield watched
    finally:
        await owner.close()
        await server.stop()


@pytest.fixture
def refusals() -> asyncio.Queue[str]:
    """Reasons that the server gives where it refuses; the call itself gets no answer."""
    return asyncio.Queue()


@pytest.fixture
async def logs(watched: Watched, refusals: asyncio.Queue[str]) -> AsyncIterator[JetStreamContext]:
    """A stock nats-py client that knows no more than the monitor's file."""
    login = BusAddress.read(watched.file)

    async def note(error: Exception) -> None:
        refusals.put_nowait(str(error))

    client = await nats.connect(
        login.url, user=login.user, password=login.password, inbox_prefix=f"_INBOX.{login.user}", error_cb=note
    )
    yield client.jetstream(timeout=DEADLINE_S)
    await client.close()


async def is_refused(call: Coroutine[Any, Any, object], of: str, refusals: asyncio.Queue[str]) -> bool:
    """Return whether the server refuses a call about a stream, once it has answered or refused it."""
    answer, refusal = asyncio.ensure_future(call), asyncio.ensure_future(refusals.get())
    await asyncio.wait({answer, refusal}, return_when=asyncio.FIRST_COMPLETED)
    refused = refusal.done()
    (answer if refused else refusal).cancel()
    await asyncio.wait({answer, refusal})
    if refused:
        assert "permissions violation" in refusal.result() and of.lower() in refusal.result()
    else:
        answer.result()  # or what it raised
    return refused


TRAINED = BATCH_TRAINED.subject(RUN)
STEPS = [1, 3, 5]  # sequences of batch.trained in its log


async def test_an_ordered_consumer_reads_what_its_filter_lets_through_in_order(logs: JetStreamContext):
    grades = await logs.subscribe(
        TRAJECTORY_GRADED.subject(RUN, "p000001-0"), stream=GRADES.full_name(RUN), ordered_consumer=True
    )
    named = ConsumerConfig(name="steps")
    steps = await logs.subscribe(TRAINED, stream=TRAINING.full_name(RUN), ordered_consumer=True, config=named)

    found = [(await grades.next_msg(DEADLINE_S)).metadata.sequence.stream for _ in range(3)]
    assert found == [1, 3, 5]
    assert [(await steps.next_msg(DEADLINE_S)).metadata.sequence.stream for _ in STEPS] == STEPS


async def test_it_begins_with_any_message_and_follows(logs: JetStreamContext, watched: Watched):
    steps = await logs.subscribe(
        TRAINED,
        stream=TRAINING.full_name(RUN),
        ordered_consumer=True,
        deliver_policy=DeliverPolicy.NEW,
        config=ConsumerConfig(name="new"),
    )
    sequence = await watched.train(4)

    assert (await steps.next_msg(DEADLINE_S)).metadata.sequence.stream == sequence


async def test_pull_consumers_are_made_in_every_way_that_the_client_has(logs: JetStreamContext):
    stream = TRAINING.full_name(RUN)
    unread = await logs.pull_subscribe(TRAINED, stream=stream)
    durable = await logs.pull_subscribe(TRAINED, stream=stream, durable="dashboard")
    await logs.add_consumer(stream, name="mine", filter_subject=TRAINED, ack_policy=AckPolicy.NONE)
    bound = await logs.pull_subscribe_bind(consumer="mine", stream=stream)

    for subscription in (unread, durable, bound):
        messages = await subscription.fetch(3, timeout=DEADLINE_S)
        assert [message.metadata.sequence.stream for message in messages] == STEPS
        if subscription is durable:
            for message in messages:
                await message.ack_sync(timeout=DEADLINE_S)
    newest = await logs.get_last_msg(stream, TRAINED, direct=True)
    assert newest.seq == STEPS[-1]
    assert (await logs.stream_info(stream)).state.messages == 6


async def test_a_consumer_without_a_name_is_refused_where_it_could_alter_a_queue_or_read_data_keys(
    logs: JetStreamContext, refusals: asyncio.Queue[str]
):
    with_queues = {queue.stream for queue in QUEUES.values()}
    refused = set()
    for stream in STREAMS:
        name = stream.full_name(RUN)
        subscription = logs.subscribe(f"asyncrl.{RUN}.>", stream=name, ordered_consumer=True)
        if await is_refused(subscription, name, refusals):
            refused.add(stream)

    assert refused == with_queues | {SECRETS}
    other = PROMPTS.full_name("other")
    assert await is_refused(logs.consumer_info(other, "rollout"), other, refusals)
    with pytest.raises(NotFoundError):
        await logs.consumer_info(TRAINING.full_name(RUN), "nobody")


async def _program(folder: Path, *words: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*words, cwd=folder, stdout=pipe, stderr=pipe)


async def _lines(process: asyncio.subprocess.Process) -> list[str]:
    async with asyncio.timeout(DEADLINE_S):
        out, error = await process.communicate()
    assert process.returncode == 0, error.decode()
    return out.decode().splitlines()


async def test_the_python_of_the_page_shows_live_steps_and_reads_history(watched: Watched, tmp_path: Path):
    written("observe.md", tmp_path)
    live = await _program(tmp_path, sys.executable, "live.py", str(watched.file), RUN)
    assert live.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        assert await live.stdout.readline() == b"3 0.75\n"
    for step in (4, 5):
        await watched.train(step)

    history = await _program(tmp_path, sys.executable, "history.py", str(watched.file), RUN, "p000001-0")

    assert await _lines(live) == ["4 1.0", "5 1.25"]
    assert await _lines(history) == ["1 0.25", "3 0.25", "5 0.25"]


@pytest.fixture(scope="session")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages that the JavaScript of the page imports."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    shutil.copy(NODE, folder)
    words = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--prefer-offline"]
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm does not install {NODE.name} within {DEADLINE_S:.0f} s")
    if done.returncode:
        pytest.skip(f"npm cannot install {NODE.name}: {done.stderr.strip()[-300:]}")
    return folder


@pytest.mark.nightly
async def test_the_javascript_of_the_page_reads_every_step_in_order(watched: Watched, node_modules: Path):
    written("observe.md", node_modules)

    steps = await _program(node_modules, "node", "steps.mjs", str(watched.file), RUN)

    assert await _lines(steps) == ["1 1 0.25", "3 2 0.5", "5 3 0.75"]


async def test_what_users_of_nats_write_first_works_on_the_server_of_the_run(
    watched: Watched, refusals: asyncio.Queue[str]
):
    login = BusAddress.read(watched.file)

    async def note(error: Exception) -> None:
        refusals.put_nowait(str(error))

    client = await nats.connect(login.url, user=login.user, password=login.password, error_cb=note)
    logs = client.jetstream(timeout=DEADLINE_S)
    stream = TRAINING.full_name(RUN)
    with pytest.raises(NotFoundError):  # no stream listens to this subject, so none is found by it
        await logs.subscribe(TRAINED)
    for options in ({}, {"ordered_consumer": True}, {"durable": "pushed"}):
        pushed = await logs.subscribe(TRAINED, stream=stream, **options)
        assert (await pushed.next_msg(DEADLINE_S)).metadata.sequence.stream == STEPS[0]
    for options in ({}, {"durable": "pulled"}):
        [message] = await (await logs.pull_subscribe(TRAINED, stream=stream, **options)).fetch(1, timeout=DEADLINE_S)
        assert message.metadata.sequence.stream == STEPS[0]
    assert {info.config.name for info in await logs.streams_info()} == {stream.full_name(RUN) for stream in STREAMS}
    assert (await logs.account_info()).streams == len(STREAMS)
    await client.close()
    assert refusals.empty()


_FIRST_WORDS = """
import { readFileSync } from "node:fs";
import { jetstreamManager } from "@nats-io/jetstream";
import { connect } from "@nats-io/transport-node";

const login = JSON.parse(readFileSync(process.argv[2]));
const client = await connect({ servers: login.url.split(","), user: login.user, pass: login.password });
const manager = await jetstreamManager(client);
let count = 0;
for await (const _ of await manager.streams.list()) count++;
console.log(count);
await client.close();
"""


async def test_a_manager_of_javascript_lists_the_streams(watched: Watched, node_modules: Path):
    (node_modules / "list.mjs").write_text(_FIRST_WORDS)

    assert await _lines(await _program(node_modules, "node", "list.mjs", str(watched.file))) == [str(len(STREAMS))]
