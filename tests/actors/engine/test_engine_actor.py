"""The engine actor of somebody else's server: which weights it asks for, and when again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import numpy as np
import pytest

from actors.engine.actor import EngineActor
from actors.runtime.actor import ActorDown
from actors.runtime.engines import follow_fleet, open_fleet
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import WRITER, publish
from asyncrl.config.pools import Purpose
from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.client import SamplingParams
from asyncrl.engine.control import ServerSpec
from asyncrl.engine.errors import VersionAbsent
from asyncrl.engine.fleet import Wanted
from asyncrl.engine.generator import Generator
from asyncrl.engine.scripted.control import ScriptedControl
from harness.sglang_like import Asked, LikeSGLang, like_sglang
from harness.stage import Stage, until
from harness.versions import EMPTY, empty_version
from topics.engines import EngineGone, EngineReady, EngineUpdating
from topics.evals import EvalRequested, EvalScored
from topics.ids import EVALUATION, prompt_name
from topics.table import BUILT_IN
from topics.topic import ENGINES
from topics.weights import WeightsRefused
from topics.wire import decode

KEPT = 4  # versions in the store; older ones are gone


def key_of(version: int) -> str:
    return f"0:{version}:{EMPTY}"


class Player:
    """An engine actor that plays inside the test, and what it publishes."""

    def __init__(self, bus: Bus, stage: Stage, actor_id: str = "engine-1") -> None:
        self.bus = bus
        self.stage = stage
        self.context = stage.context("engine", bus)
        self.context.actor_id = actor_id
        self.messages: list[Any] = []
        self.newest = -1
        self._reader = LogReader(bus, ENGINES, self._on_record)

    async def start(self) -> None:
        await self._reader.start()
        self.running = asyncio.create_task(EngineActor(self.context).run())

    async def stop(self) -> None:
        self.context.stop.set()
        await asyncio.gather(self.running, return_exceptions=True)
        await self._reader.close()

    async def publish(self, version: int, answers: int = 0) -> None:
        message = empty_version(self.context.files, version)
        message.answers = answers
        await publish(self.bus, message, headers={WRITER: "a learner"})
        self.newest = version

    async def refuse_old(self, key: str) -> str:
        """As a server whose weights are files: those that were pruned are not there."""
        version = int(key.split(":")[1])
        return f"no weights in v{version}" if version <= self.newest - KEPT else ""

    def versions(self, kind: type[Any]) -> list[int]:
        return [message.version for message in self.messages if type(message) is kind]

    def _on_record(self, record: Record) -> None:
        self.messages.append(decode(BUILT_IN.topic_of(record.subject).message, record.data))


@pytest.fixture
async def inference() -> AsyncIterator[LikeSGLang]:
    async with like_sglang() as inference:
        yield inference


@pytest.fixture
async def make(bus: Bus, stage: Callable[..., Stage]) -> AsyncIterator[Callable[..., Player]]:
    """Makes the actor of the server at an address."""
    made: list[Player] = []

    def make(address: str, **settings: Any) -> Player:
        tables: dict[str, Any] = {
            "engine": {"kind": "external", "addresses": [address]},
            "supervision": {"silence_s": 1.0},
        }
        made.append(Player(bus, stage(**tables, **settings)))
        return made[-1]

    yield make
    for player in made:
        await player.stop()


async def test_an_actor_that_starts_late_asks_for_the_newest_weights_alone(
    inference: LikeSGLang, make: Callable[[str], Player]
):
    player = make(inference.address)
    inference.refusal = player.refuse_old
    for version in range(120):
        await player.publish(version)

    await player.start()

    await until(lambda: bool(player.versions(EngineReady)) or player.running.done(), "it is ready")
    assert inference.loads == [key_of(119)]
    assert player.versions(EngineUpdating) == [119]


@pytest.mark.parametrize(("update", "aborts"), [("resume", True), ("in_place", False)])
async def test_requests_are_sent_back_before_an_update_or_stay_under_it(
    inference: LikeSGLang, make: Callable[..., Player], update: str, aborts: bool
):
    player = make(inference.address, weights={"update": update})
    await player.publish(0)
    await player.start()

    await until(lambda: player.versions(EngineReady) == [0] or player.running.done(), "it is ready")
    assert not player.running.done(), player.running.exception()
    assert (inference.aborted_all > 0) is aborts
    assert inference.loads == [key_of(0)]


async def test_weights_that_are_refused_and_no_longer_the_newest_end_nothing(
    inference: LikeSGLang, make: Callable[[str], Player]
):
    player = make(inference.address)

    async def refusal(key: str) -> str:
        if key == key_of(1):
            for version in range(2, 3 + KEPT):
                await player.publish(version)
        return await player.refuse_old(key)

    inference.refusal = refusal
    await player.publish(1)
    await player.start()

    await until(lambda: 6 in player.versions(EngineReady), "it has the newest")
    assert inference.loads[-1] == key_of(6)  # after version 5, where it was told of that one first
    assert key_of(1) not in inference.loads


async def test_the_newest_weights_refused_are_asked_for_once_more_and_then_end_the_actor_with_the_servers_error(
    inference: LikeSGLang, make: Callable[[str], Player]
):
    player = make(inference.address)

    async def refusal(key: str) -> str:
        return "no such shape"

    inference.refusal = refusal
    await player.publish(1)
    await player.start()
    await until(lambda: player.versions(WeightsRefused) == [1], "they are asked for")
    [refused] = [message for message in player.messages if isinstance(message, WeightsRefused)]
    assert (refused.sequence, refused.version) == (1, 1)
    assert "no such shape" in refused.reason
    await player.publish(1, answers=refused.sequence)

    with pytest.raises(ActorDown, match=r"refused twice: .*no such shape"):
        await asyncio.wait_for(player.running, 120)
    assert not inference.paused  # its owner finds it as it was


async def test_a_server_that_takes_no_version_ends_the_actor_though_newer_ones_keep_coming(
    inference: LikeSGLang, make: Callable[[str], Player]
):
    player = make(inference.address)
    refused: list[str] = []

    async def refusal(key: str) -> str:
        refused.append(key)
        await player.publish(player.newest + 1)  # steps are faster than loads
        return "no such shape"

    inference.refusal = refusal
    await player.publish(1)
    await player.start()

    with pytest.raises(ActorDown, match=r"version 3 was refused like 2 before it: .*no such shape"):
        await asyncio.wait_for(player.running, 300)
    assert refused == [key_of(1), key_of(2), key_of(3)]
    assert not inference.paused


async def test_a_server_that_lost_its_weights_within_a_lease_gets_them_again(
    inference: LikeSGLang, make: Callable[[str], Player]
):
    player = make(inference.address)
    await player.publish(3)
    await player.start()
    await until(lambda: player.versions(EngineReady) == [3], "it is ready")

    inference.weight_version = "default" * 1000  # it was restarted, or somebody else has loaded something

    await until(lambda: player.versions(EngineReady) == [3, 3], "it is ready again")
    assert inference.loads == [key_of(3)] * 2
    again = [message for message in player.messages if isinstance(message, EngineUpdating)][-1]
    assert again.found == ("default" * 1000)[:1024]  # more is in no message
    assert player.context.vitals["relabelled"] == 1


async def test_a_server_that_another_client_gave_weights_without_a_name_gets_its_own_again(
    inference: LikeSGLang, make: Callable[[str], Player]
):
    player = make(inference.address)
    await player.publish(3)
    await player.start()
    await until(lambda: player.versions(EngineReady) == [3], "it is ready")

    async with aiohttp.ClientSession(inference.address) as session:
        await session.post("/update_weights_from_disk", json={"model_path": "/weights/of/another"})
    assert inference.weight_version == key_of(3), "it tells the name that it had"

    await until(lambda: player.versions(EngineReady) == [3, 3], "it is ready again")
    assert inference.model_path == str(empty_version(player.context.files, 3).location)
    again = [message for message in player.messages if isinstance(message, EngineUpdating)][-1]
    assert again.found == f"{key_of(3)} from /weights/of/another"


async def test_weights_that_come_back_meet_no_prefix_that_others_computed_under_their_name(
    bus: Bus, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    made: list[Any] = []

    class Owned(ScriptedControl):
        own = True

        def __init__(self, home: ServerSpec) -> None:
            super().__init__(home)
            made.append(self)

    monkeypatch.setattr("actors.engine.actor.open_control", Owned)
    player = Player(bus, stage(engine={"kind": "scripted"}, supervision={"silence_s": 1.0}))
    await player.start()
    try:
        for version in (1, 2):
            await player.publish(version)
            await until(lambda v=version: player.versions(EngineReady)[-1:] == [v], "the version is there")
        made[0]._label = "of another client"
        await until(lambda: player.versions(EngineReady) == [1, 2, 2], "it is loaded again")
    finally:
        await player.stop()

    keys = [message.cache_key for message in player.messages if isinstance(message, EngineReady)]
    assert keys[:2] == [key_of(1), key_of(2)]
    assert keys[2].startswith(f"{key_of(2)}:")


async def test_a_server_that_does_not_answer_for_its_health_while_it_is_paused_is_not_given_up(
    inference: LikeSGLang, make: Callable[[str], Player]
):
    """The update takes longer than the silence after which a server counts as dead."""
    player = make(inference.address)
    loading = asyncio.Event()

    async def slowly(key: str) -> str:
        loading.set()
        before = inference.health_asked
        await until(lambda: inference.health_asked > before + 4, "it has been silent for more than twice the lease")
        return ""

    inference.refusal = slowly
    await player.publish(1)
    await player.start()
    await asyncio.wait_for(loading.wait(), 120)

    await until(lambda: player.versions(EngineReady) == [1], "it is ready")
    assert not any(isinstance(message, EngineGone) for message in player.messages)
    assert player.versions(EngineUpdating) == [1]


async def test_a_server_that_is_away_when_weights_come_gets_them_when_it_is_back(make: Callable[[str], Player]):
    async with like_sglang() as inference:
        player = make(inference.address)
        await player.publish(1)
        await player.start()
        await until(lambda: player.versions(EngineReady) == [1], "it is ready")
    await player.publish(2)
    await until(lambda: any(isinstance(message, EngineGone) for message in player.messages), "it is gone")

    async with like_sglang(int(inference.address.rsplit(":", 1)[1])) as back:
        await until(lambda: player.versions(EngineReady) == [1, 2], "it is ready with the newest")

    assert back.loads == [key_of(2)]


async def test_a_server_that_its_owner_restarts_with_other_weights_has_no_token_in_an_answer(
    make: Callable[[str], Player],
):
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(like_sglang())
        player = make(first.address)
        await player.publish(3)
        await player.start()
        context = player.stage.context("rollout", player.bus)
        fleet = open_fleet(context)
        stack.push_async_callback(fleet.close)
        listener = await follow_fleet(context, fleet)
        stack.push_async_callback(listener.close)
        broken = asyncio.Event()

        async def breaks(asked: Asked) -> AsyncIterator[dict[str, Any]]:
            yield first.answer(asked, [11, 12, 13], None)
            await broken.wait()
            raise ConnectionError

        first.events = breaks
        generator = Generator(fleet, ModelInfo("any", 64, 4096), str, counts=context.vitals)
        running = asyncio.create_task(generator.generate(np.array([5], np.int32), SamplingParams(100)))
        await until(lambda: bool(first.asked), "the server is asked")
        await first.die()
        again = await stack.enter_async_context(like_sglang(int(first.address.rsplit(":", 1)[1])))
        broken.set()
        answer = await asyncio.wait_for(running, 300)

    assert (len(answer.tokens), set(answer.versions.tolist())) == (100, {3})
    assert answer.tokens[:3].tolist() == [11, 12, 13]
    assert again.loads == [key_of(3)]
    keys = [asked.extra_key for asked in (first.asked[-1], again.asked[-1])]
    assert len(set(keys)) == 2  # what it cached by its other weights is not met
    assert all(one.startswith(f"{key_of(3)}:") for one in keys)


async def test_an_engine_of_evaluations_holds_the_version_of_the_oldest_and_passes_over_one_that_is_gone(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang
):
    groups = {name: {"kind": "external", "addresses": [inference.address]} for name in ("train", "held")}
    made = stage(engine={"groups": groups}, eval={"engines": "held", "prompts": 2}, supervision={"silence_s": 1.0})
    player = Player(bus, made, "engine-held-1")
    inference.refusal = player.refuse_old
    context = made.context("rollout", bus)
    fleets = {evaluations: open_fleet(context) for evaluations in (False, True)}
    purposes: dict[bool, Purpose] = {False: "training", True: "evaluations"}
    listeners = [await follow_fleet(context, fleet, purposes[own]) for own, fleet in fleets.items()]
    numbers = {0: 0, 3: 1, 9: 2}  # of the evaluations, by version

    async def ask(version: int) -> None:
        request = EvalRequested(prompt_name(EVALUATION, numbers[version]), version, 2, 0.0)
        await publish(bus, request, headers={WRITER: "a learner"})

    try:
        await player.publish(0)
        await ask(0)
        await player.start()
        await until(lambda: player.versions(EngineReady) == [0] or player.running.done(), "it has version 0")
        for version in range(1, 10):
            await player.publish(version)
            if version in numbers:
                await ask(version)
        absent = asyncio.create_task(fleets[True].choose(Wanted(3, exact=True)))
        training = asyncio.create_task(fleets[False].choose(Wanted(0)))
        scored = EvalScored(prompt_name(EVALUATION, 0), 0, {0: 4}, 0.0, 2, 0, 1.0)
        await publish(bus, scored, headers={WRITER: "a buffer"})

        await until(lambda: 9 in player.versions(EngineReady) or player.running.done(), "it has version 9")
        assert (player.versions(EngineReady), player.versions(WeightsRefused)) == ([0, 9], [3])
        assert inference.loads == [key_of(0), key_of(9)]
        with pytest.raises(VersionAbsent, match="version 3"):
            await absent
        assert (await fleets[True].choose(Wanted(9, exact=True))).engine_id == "engine-held-1"
        assert not training.done()  # that engine serves evaluations alone
        training.cancel()
    finally:
        for listener in listeners:
            await listener.close()
        for fleet in fleets.values():
            await fleet.close()
        await player.stop()


async def test_a_run_that_only_serves_takes_a_server_as_it_is_whenever_it_answers(make: Callable[..., Player]):
    async with like_sglang() as inference:
        player = make(inference.address, only=["engine"])
        await player.start()
        await until(lambda: player.versions(EngineReady) == [0], "it is ready")
    await until(lambda: any(isinstance(message, EngineGone) for message in player.messages), "it is gone")

    async with like_sglang(int(inference.address.rsplit(":", 1)[1])) as back:
        await until(lambda: player.versions(EngineReady) == [0, 0], "it is ready again")

    assert not back.loads
    assert not player.versions(EngineUpdating)
