"""Versions out of the learner's memory: quicker than the store, and never waited for."""

import asyncio
import pickle
from collections.abc import Callable

import msgspec
import pytest

from actors.engine.weight_transfer import unseen
from actors.runtime.actor import Context
from asyncrl.bus.connection import Bus
from asyncrl.config.engine_settings import EngineGroup, EngineSettings
from asyncrl.engine.client import EngineClient
from asyncrl.engine.errors import EngineRefused
from asyncrl.ports import free_port
from asyncrl.process import ChildProcess, python
from harness.configs import from_settings
from harness.direct import playing, reached, sampled, senders_are_there, server_of, ways
from harness.memory import Memory
from harness.stage import DEADLINE_S, Stage, until
from harness.versions import Answers
from topics.engines import EngineReady

KINDS = ["gloo", "ipc"]


@pytest.fixture
def context(
    bus: Bus, stage: Callable[..., Stage], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Context:
    monkeypatch.setattr("actors.engine.weight_transfer._ANSWER_S", 2 * DEADLINE_S)  # a loaded machine is slow
    monkeypatch.setattr("asyncrl.weights.shared._CALL_BYTES", 1 << 16)  # a small model comes in several calls
    kind = getattr(request, "param", "gloo")
    made = stage(
        engine={"kind": "embedded", "count": 2, "max_running": 4},
        weights={"transport": kind, "transport_deadline_s": 2 * DEADLINE_S},
        supervision={"silence_s": 5.0},
    )
    made.make_model()
    return made.context("engine", bus)


@pytest.mark.parametrize("context", KINDS, indirect=True)
async def test_two_engines_take_versions_out_of_memory_and_one_that_joins_late_does_too(bus: Bus, context: Context):
    async with Memory(bus, context, context.files.model) as memory, Answers(bus) as answers:
        async with playing(context) as first:
            await senders_are_there(first)
            for version in range(3):
                message = await memory.publish()
                await until(lambda version=version: version in ways(answers), f"it has version {version}")
            async with playing(context, 2) as second:
                await until(lambda: 2 in ways(answers, "engine-2"), "the second one has it")
                await senders_are_there(second)
                message = await memory.publish()
                await until(lambda: 3 in ways(answers) and 3 in ways(answers, "engine-2"), "both have the next one")
                both = [await sampled(context, answers, f"engine-{number}") for number in (1, 2)]
        async with playing(context, 2):  # it loads the version from the store, or from memory
            await until(lambda: len([m for m in answers.messages if isinstance(m, EngineReady)]) == 7, "it is back")
            again = await sampled(context, answers, "engine-2")

    kind = context.config.weights.transport
    assert ways(answers) == dict.fromkeys(range(4), kind)
    assert ways(answers, "engine-2")[3] in (kind, "")
    assert both[0] == both[1] == again
    assert both[0][0] == message.key


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (["kind=sglang"], ""),
        (["kind=sglang", "gpus=[0]"], "engine.gpus gives it 1"),
        (["kind=sglang", "gpus=[0, 1]", "arguments=['--tp=2']"], ""),
        (["kind=sglang", "environment={CUDA_VISIBLE_DEVICES='0'}"], "CUDA_VISIBLE_DEVICES is set"),
        (["kind=external", "addresses=['http://127.0.0.1:30000']"], "it is of another owner"),
    ],
)
def test_a_server_that_may_not_see_the_gpus_of_all_ranks_maps_none_of_them(engine: list[str], reason: str):
    settings = ["weights.transport=ipc", "learner.device=cuda", "learner.ranks=2", *(f"engine.{one}" for one in engine)]
    config = from_settings(*settings).config

    assert unseen(config, config.engine).endswith(reason) and bool(unseen(config, config.engine)) == bool(reason)
    config.learner.ranks = 1
    assert unseen(config, config.engine) == ""


@pytest.mark.parametrize("context", ["ipc"], indirect=True)
async def test_an_engine_of_another_host_holds_nothing_back(
    bus: Bus, context: Context, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("actors.engine.weight_transfer.host_name", lambda: "elsewhere")
    async with Memory(bus, context, context.files.model) as memory, Answers(bus) as answers, playing(context) as first:
        await senders_are_there(first)
        await memory.publish()
        await reached(answers, 0)
        async with asyncio.timeout(DEADLINE_S):
            await memory.publish()
        await reached(answers, 1)

    assert ways(answers) == {0: "", 1: ""}
    fallbacks = [message.fallback for message in answers.messages if isinstance(message, EngineReady)]
    assert [text.startswith("the learner is on another host, ") for text in fallbacks] == [True, True]


@pytest.mark.parametrize("context", ["ipc"], indirect=True)
async def test_an_answer_that_would_make_the_server_call_anything_never_reaches_it(
    bus: Bus, context: Context, monkeypatch: pytest.MonkeyPatch
):
    async def reaches(*_: object) -> None:
        raise AssertionError("the server got it")

    monkeypatch.setattr("asyncrl.training.host_copy.pack_tensors", lambda *_: [pickle.dumps(print)])
    monkeypatch.setattr(EngineClient, "update_from_memory", reaches)
    async with Memory(bus, context, context.files.model) as memory, Answers(bus) as answers, playing(context) as first:
        await senders_are_there(first)
        await memory.publish()
        await reached(answers, 0)

    (ready,) = [message for message in answers.messages if isinstance(message, EngineReady)]
    assert ready.fallback == "the learner's answer: builtins.print belongs to no tensor in shared memory"


async def test_a_server_of_another_owner_that_was_restarted_is_sent_nothing_over_a_group_it_never_joined(
    bus: Bus, context: Context
):
    port = free_port()
    outside = EngineGroup(kind="external", addresses=[f"http://127.0.0.1:{port}"])
    context.config.engine = EngineSettings(groups={"lent": outside})
    command = ["-m", "asyncrl.engine.embedded", "--model-path", str(context.files.model), "--port", str(port)]

    async def start() -> ChildProcess:
        process = await ChildProcess.start(python(*command), log=context.files.logs / "lent.log", environment={})
        client = EngineClient(outside.addresses[0])
        await until(client.health, "the server answers")
        await client.close()
        return process

    server = await start()
    async with Memory(bus, context, context.files.model) as memory, Answers(bus) as answers:
        context.actor_id = "engine-lent-1"
        async with playing(context, "lent-1") as lent:
            await senders_are_there(lent)
            await memory.publish()
            await reached(answers, 0, "engine-lent-1")
            await server.end()
            server = await start()
            await until(lambda: len([m for m in answers.messages if isinstance(m, EngineReady)]) == 2, "it is ready")
            await senders_are_there(lent)
            await memory.publish()
            await reached(answers, 1, "engine-lent-1")
    await server.end()

    ready = [message for message in answers.messages if isinstance(message, EngineReady)]
    assert [(message.version, message.direct) for message in ready] == [(0, "gloo"), (0, ""), (1, "gloo")]
    assert ready[1].fallback.startswith("the server is not the one that joined the groups: it has the weights '")


async def test_a_server_leaves_a_group_whose_sender_is_gone(bus: Bus, context: Context):
    async with Memory(bus, context, context.files.model) as memory, Answers(bus) as answers, playing(context) as actor:
        await senders_are_there(actor)
        await memory.publish()
        await reached(answers, 0)
        direct = actor._direct
        assert direct is not None
        (sender,) = direct._senders() or []
        sender.kill()
        await memory.publish()
        await reached(answers, 1)
        with pytest.raises(EngineRefused, match="does not exist"):
            await direct._server.leave_group(sender.group)
        await senders_are_there(actor)
        await memory.publish()
        await reached(answers, 2)

    assert ways(answers) == {0: "gloo", 1: "", 2: "gloo"}


@pytest.mark.parametrize("context", KINDS, indirect=True)
async def test_a_frozen_server_holds_the_learner_back_for_the_deadline_at_most_and_reads_the_store(
    bus: Bus, context: Context
):
    weights = msgspec.structs.replace(context.config.weights, transport_deadline_s=2.0)
    context.config = msgspec.structs.replace(context.config, weights=weights)
    async with Memory(bus, context, context.files.model) as memory, Answers(bus) as answers:  # noqa: SIM117 - servers of that memory
        async with playing(context) as first, playing(context, 2) as second:
            await asyncio.gather(senders_are_there(first), senders_are_there(second))
            await memory.publish()
            await asyncio.gather(reached(answers, 0), reached(answers, 0, "engine-2"))
            frozen = server_of(second)
            frozen.suspend()
            await memory.publish()
            await reached(answers, 1)
            async with asyncio.timeout(DEADLINE_S):
                await memory.publish()  # it has waited for the frozen one no longer than for the deadline
            await reached(answers, 2)
            frozen.resume()
            await reached(answers, 2, "engine-2")
            both = [await sampled(context, answers, f"engine-{number}") for number in (1, 2)]

    assert 1 not in ways(answers, "engine-2") or ways(answers, "engine-2")[1] == ""
    assert [*ways(answers)] == [0, 1, 2]
    assert both[0] == both[1]


@pytest.mark.parametrize("context", KINDS, indirect=True)
async def test_tensors_with_another_digest_are_refused_and_the_store_is_read(bus: Bus, context: Context):
    async with Memory(bus, context, context.files.model) as memory, Answers(bus) as answers, playing(context) as first:
        await senders_are_there(first)
        await memory.publish()
        await reached(answers, 0)
        memory.spoil = True
        message = await memory.publish()
        await reached(answers, 1)
        label, _ = await sampled(context, answers, "engine-1")
        memory.spoil = False
        await senders_are_there(first)
        await memory.publish()
        await reached(answers, 2)

    kind = context.config.weights.transport
    assert ways(answers) == {0: kind, 1: "", 2: kind}
    assert label == message.key
    assert first.context.vitals["direct_failed"] == 1
    fallbacks = [message.fallback for message in answers.messages if isinstance(message, EngineReady)]
    assert [bool(text) for text in fallbacks] == [False, True, False]
    assert f"weight_version names {message.digest}" in fallbacks[1]


@pytest.mark.parametrize("context", KINDS, indirect=True)
async def test_a_learner_that_starts_again_offers_memory_of_its_own(bus: Bus, context: Context):
    async with Answers(bus) as answers, playing(context) as first:
        await senders_are_there(first)
        async with Memory(bus, context, context.files.model) as memory:
            await memory.publish()
            await reached(answers, 0)
        async with Memory(bus, context, context.files.model) as again:
            again.version = 0
            message = await again.publish()
            await reached(answers, 1)
            label, _ = await sampled(context, answers, "engine-1")

    assert ways(answers) == dict.fromkeys(range(2), context.config.weights.transport)
    assert label == message.key
