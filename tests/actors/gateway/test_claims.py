"""Several gateways are asked for one request in the same moment: one of them samples."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession

from actors.gateway import claims
from actors.gateway.turn_store import TurnStore
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import TIME_TO_LIVE, publish, publish_if_latest, read
from asyncrl.live.keys import make_key
from asyncrl.ports import free_port
from harness.gateways import Served, gateway_stage, in_two_halves, ready, stored_turns
from harness.live_runs import answers
from harness.sglang_like import Fault, LikeSGLang
from harness.stage import Connect, Stage, until
from topics.turns import TURN_CLAIMED, TurnClaimed, TurnFinished, TurnStarted

BODY: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 5}


class Two:
    """Two gateways of one run, each with a port of its own, and clients of one tenant."""

    def __init__(self, served: list[Served], client: ClientSession) -> None:
        self.served, self.client = served, client

    async def ask(self, number: int, *, choices: int = 1, **headers: str) -> tuple[int, Any]:
        """Return status and body of a reply; the connection is one that no other request uses."""
        path = f"{self.served[number].address}/v1/chat/completions"
        async with self.client.post(path, json=BODY | {"n": choices}, headers=headers) as reply:
            return reply.status, await reply.json()

    async def ask_both(self, **headers: str) -> list[tuple[int, Any]]:
        return [*await asyncio.gather(self.ask(0, **headers), self.ask(1, **headers))]

    async def know_begins(self, bus: Bus, count: int = 1) -> list[TurnStarted]:
        """Return so many begins once they are stored and both gateways have read them; a prompt is sent before that."""
        begun: list[TurnStarted] = []

        async def known() -> bool:
            begun[:] = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
            logs = [one.gateway._log for one in self.served]
            return len(begun) == count and all(log.has_begun(turn.turn_id) for log in logs for turn in begun)

        await until(known, "both know the begins")
        return begun


async def claimed_in(bus: Bus) -> list[Any]:
    return [fact for fact in await stored_turns(bus) if isinstance(fact, TurnClaimed)]


@pytest.fixture
async def two(
    bus: Bus, connect: Connect, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
) -> AsyncIterator[Two]:
    served = []
    for number, its_bus in enumerate((bus, await connect(bus.run)), 1):
        made = gateway_stage(stage, tmp_path / f"model{number}", inference, count=2, port=free_port())
        served.append(Served(its_bus, made, number))
        await served[-1].start()
    await publish(bus, ready(inference))
    async with ClientSession(headers={"x-api-key": served[0].key}) as client:
        yield Two(served, client)
    for one in served:
        await one.stop()


async def test_one_idempotency_key_is_sampled_once_by_whichever_gateway_is_first(
    two: Two, inference: LikeSGLang, bus: Bus
):
    assert (await two.ask(0))[0] == (await two.ask(1))[0] == 200
    assert await read_last(bus, TURN_CLAIMED) is None  # without a key nothing is claimed, where nothing is under way
    assert len(inference.asked) == 2
    for number in range(5):
        key = {"Idempotency-Key": f"k{number}"}
        got = await two.ask_both(**key)
        replies = {body["id"] for status, body in got if status == 200}
        assert len(replies) == 1 and {status for status, _ in got} <= {200, 503}, got
        again = await two.ask_both(**key)
        assert {(status, body.get("id")) for status, body in again} == {(200, *replies)}
        assert len(inference.asked) == 3 + number


async def test_a_cut_reply_is_gone_on_with_by_one_of_two_gateways(two: Two, inference: LikeSGLang, bus: Bus):
    in_two_halves(inference, 2)
    cut = asyncio.create_task(two.ask(0))
    await until(lambda: len(inference.asked) == 1, "it is under way")
    cut.cancel()
    inference.events = inference.one_event

    async def known() -> bool:
        return any(isinstance(fact, TurnFinished) for fact in await stored_turns(bus))

    await until(known, "it is stored as gone, though no further token has come")
    assert [status for status, _ in await two.ask_both()] == [200, 200]
    begun = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert [turn.continues for turn in begun].count(begun[0].turn_id) == 1 and len(begun) == 3


@pytest.mark.parametrize("keyed", [False, True])
async def test_a_request_waits_for_the_end_of_an_equal_one_whose_client_has_just_left_another_gateway(
    two: Two, inference: LikeSGLang, bus: Bus, monkeypatch: pytest.MonkeyPatch, keyed: bool
):
    in_two_halves(inference, 2)
    asks, put, key = asyncio.Event(), TurnStore.put, {"Idempotency-Key": "k"} if keyed else {}

    async def held(facts: TurnStore, fact: Any, **options: Any) -> bool:
        if isinstance(fact, TurnFinished):
            await asks.wait()
        return await put(facts, fact, **options)

    async def claimed() -> bool:
        record = await read_last(bus, TURN_CLAIMED)
        return record is not None and record.key.startswith("after-")

    monkeypatch.setattr(TurnStore, "put", held)
    cut = asyncio.create_task(two.ask(0, **key))
    await until(lambda: bool(inference.asked and inference.asked[0].cumulative), "its first tokens are there")
    await two.know_begins(bus)
    cut.cancel()
    await until(lambda: bool(two.served[0].gateway._leaving._ends), "its connection is lost")
    inference.events = inference.one_event
    again = asyncio.create_task(two.ask(1, **key))
    await until(claimed, "the other gateway asks for it")
    asks.set()
    assert (await again)[0] == 200
    first, second = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert second.continues == first.turn_id and len(inference.asked[1].ids) == len(inference.asked[0].ids) + 2


async def test_a_request_of_several_choices_waits_for_the_ends_of_all_of_them(
    two: Two, inference: LikeSGLang, bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    in_two_halves(inference, 2)
    asked, put = asyncio.Event(), TurnStore.put

    async def held(facts: TurnStore, fact: Any, **options: Any) -> bool:
        if isinstance(fact, TurnFinished):
            await asked.wait()
        return await put(facts, fact, **options)

    async def claimed() -> bool:
        return {turn.turn_id for turn in begun} == {
            fact.claim_id.removeprefix("after-") for fact in await claimed_in(bus)
        }

    cut = asyncio.create_task(two.ask(0, choices=3))
    await until(lambda: len(inference.asked) == 3 and all(one.cumulative for one in inference.asked), "first tokens")
    begun = await two.know_begins(bus, 3)
    monkeypatch.setattr(TurnStore, "put", held)
    cut.cancel()
    await until(lambda: bool(two.served[0].gateway._leaving._ends), "its connection is lost")
    inference.events = inference.one_event
    again = asyncio.create_task(two.ask(1, choices=3))
    await until(claimed, "the other gateway asks for each")
    asked.set()
    assert (await again)[0] == 200
    after = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)][3:]
    assert {turn.continues for turn in after} == {turn.turn_id for turn in begun}


async def test_a_key_is_free_again_where_the_client_has_left_before_its_turn_began(
    two: Two, inference: LikeSGLang, bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    places, key = two.served[0].gateway._places, {"Idempotency-Key": "k"}
    monkeypatch.setattr(places, "_most", 1)
    go_on = in_two_halves(inference)
    first = asyncio.create_task(two.ask(0))
    await until(lambda: len(inference.asked) == 1, "it has the only place")
    waits = asyncio.create_task(two.ask(0, **key))
    await until(lambda: places.waiting == 1, "the request with the key waits for it")
    assert (await two.ask(1, **key))[0] == 503
    waits.cancel()

    async def free() -> bool:
        last = await read_last(bus, TURN_CLAIMED)
        return last is not None and (await read(bus, TurnClaimed, last)).turn_id == last.key

    await until(free, "its claim is given back")
    inference.events = inference.one_event
    status, body = await two.ask(1, **key)
    assert status == 200 and not first.done()
    go_on.set()
    assert (await first)[0] == 200 and (await two.ask(0, **key))[1]["id"] == body["id"]


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims of gateways that start later outlast a machine that stands still for a while."""
    monkeypatch.setattr(claims, "_SPARE_S", 600.0)


async def test_an_equal_request_is_sampled_anew_while_the_client_of_the_other_is_there(
    lasting: None, two: Two, inference: LikeSGLang, bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(claims, "_LIMIT_S", 30.0)  # in which the other gateway answers, also on a loaded machine
    go_on = in_two_halves(inference, 2)
    first = asyncio.create_task(two.ask(0))
    await until(lambda: len(inference.asked) == 1, "it is under way")
    await two.know_begins(bus)
    inference.events = inference.one_event
    others = await asyncio.gather(*(two.ask(1) for _ in range(3)))
    assert [status for status, _ in others] == [200] * 3 and not first.done()
    go_on.set()
    assert (await first)[0] == 200
    begun = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert [turn.continues for turn in begun] == [""] * 4
    last = await read_last(bus, TURN_CLAIMED)
    assert last is not None and (await read(bus, TurnClaimed, last)).turn_id == begun[0].turn_id  # its gateway said so


async def test_the_claim_of_a_gateway_that_died_before_its_turn_began_expires(
    two: Two, inference: LikeSGLang, bus: Bus
):
    async def refuse(_asked: Any) -> Any:
        raise Fault(400, "no")

    inference.serve = refuse
    key = {"Idempotency-Key": "k"}
    assert (await two.ask(0, **key))[0] == 500
    inference.serve = inference.whole
    claim = await read_last(bus, TURN_CLAIMED)
    assert claim is not None
    died = TurnClaimed(claim_id=claim.key, turn_id="t0")
    await publish_if_latest(bus, died, claim.sequence, headers={TIME_TO_LIVE: "1s"})

    status, body = await two.ask(1, **key)
    assert status == 503 and "is running" in body["error"]["message"]

    async def answered() -> bool:
        return (await two.ask(1, **key))[0] == 200

    await until(answered, "the claim has expired")


async def test_the_gateway_that_is_left_goes_on_with_the_reply_of_one_that_was_killed(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    go_on = in_two_halves(inference, 70)
    made = gateway_stage(stage, tmp_path / "model", inference, count=2)
    killed = await made.start("gateway", 2)
    await until(lambda: answers(f"http://127.0.0.1:{made.config.gateway.port}"), "it listens")
    key, added = make_key("anna")
    for message in (added, ready(inference)):
        await publish(bus, message)
    body = BODY | {"max_tokens": 90, "stream": True}
    async with ClientSession(f"http://127.0.0.1:{made.config.gateway.port}", headers={"x-api-key": key}) as client:

        async def known() -> bool:
            return (await client.get("/v1/models")).status == 200

        await until(known, "it knows the key")
        cut = asyncio.create_task(client.post("/v1/chat/completions", json=body))

        async def stored() -> bool:
            return len(await stored_turns(bus)) == 2

        await until(stored, "its first tokens are stored")
        left = Served(bus, made)
        await left.start()
        killed.kill()
        await killed.wait()
        go_on.set()
        with contextlib.suppress(ClientError):
            await (await cut).read()
        reply = await client.post("/v1/chat/completions", json=body | {"stream": False})
        assert (await reply.json())["usage"]["completion_tokens"] == 90
    await left.stop()
    first, second = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert second.continues == first.turn_id
    assert len(inference.asked[1].ids) >= len(first.tokens) + 64
