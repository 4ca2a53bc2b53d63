"""A client's retry goes on with the stored reply; histories are read back from the log, by any gateway."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from actors.gateway import actor
from actors.gateway.clients import Leaving
from actors.gateway.meter import Meter
from actors.gateway.turn_store import TurnStore
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.live.keys import make_key
from asyncrl.ports import free_port
from harness.gateways import Served, gateway, gateway_stage, in_two_halves, ready, stored_turns
from harness.live_runs import answers
from harness.sdks import anthropic, openai, sdks
from harness.sglang_like import LikeSGLang
from harness.stage import Connect, Stage, until
from topics.turns import TurnFinished, TurnStarted

FIRST, MOST = 70, 90  # tokens until a reply stops, and in all
USER = [{"role": "user", "content": "abc"}]


async def test_a_gateway_killed_in_the_middle_of_a_reply_is_followed_by_one_that_goes_on_with_it(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    go_on = in_two_halves(inference, FIRST)
    made = gateway_stage(stage, tmp_path / "model", inference, port=(port := free_port()))
    address = f"http://127.0.0.1:{port}"
    key, added = make_key("anna")
    await publish(bus, added)
    await publish(bus, ready(inference))
    process = await made.start("gateway")
    await until(lambda: answers(address), "the gateway listens")
    async with sdks(address, key) as (_, second):
        with pytest.raises(Exception, match="peer closed connection"):  # of the HTTP client: the SDK hands it on
            async with second.messages.stream(model="any", messages=USER, max_tokens=MOST) as stream:
                async for _ in stream.text_stream:
                    if len(inference.asked) == 1 and len(await stored_turns(bus)) == 2:
                        process.kill()
        await process.wait()
        go_on.set()
        await made.start("gateway")
        await until(lambda: answers(address), "the next gateway listens")
        whole = await second.messages.create(model="any", messages=USER, max_tokens=MOST)
        other = await second.messages.create(model="any", messages=USER, max_tokens=MOST)

    facts = await stored_turns(bus)
    begun = [fact for fact in facts if isinstance(fact, TurnStarted)]
    ended = {fact.turn_id: fact for fact in facts if isinstance(fact, TurnFinished)}
    assert len(begun) == len(ended) == 3
    assert [ended[turn.turn_id].finish for turn in begun] == ["gone", "length", "length"]
    partial, reply = ended[begun[0].turn_id].tokens.tolist(), ended[begun[1].turn_id].tokens.tolist()
    assert len(partial) >= 64 and reply[: len(partial)] == partial and len(reply) == MOST
    assert begun[1].continues == begun[0].turn_id and not begun[2].continues  # only once: the third is a new request
    assert inference.asked[1].ids == begun[1].tokens.tolist() + partial
    assert whole.usage.output_tokens == other.usage.output_tokens == MOST


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "k1"}])
async def test_a_request_whose_connection_breaks_ends_at_once_and_its_repeat_goes_on_with_the_tokens(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, headers: dict[str, str]
):
    go_on = in_two_halves(inference, 10)
    asked = {"model": "any", "messages": USER, "max_tokens": 20, "extra_headers": headers}
    async with (
        gateway(bus, stage, tmp_path / "model", inference, in_flight=1, keepalive_s=600) as served,
        sdks(served.address, served.key) as (first, _),
    ):
        under_way = asyncio.create_task(first.chat.completions.create(**asked))
        await until(lambda: bool(inference.asked and inference.asked[0].cumulative), "its first tokens are there")
        waits = asyncio.create_task(first.chat.completions.create(model="any", messages=USER))
        await until(lambda: served.gateway._places.waiting == 1, "another one waits for its place")
        for cut in (waits, under_way):
            cut.cancel()
            await asyncio.wait([cut])
        again = asyncio.create_task(first.chat.completions.create(**asked))
        await until(lambda: len(inference.asked) == 2, "it is asked for again")
        go_on.set()
        assert (await again).usage.completion_tokens == 20
        assert served.gateway._places.waiting == 0 and served.count("clients_gone") == 2
    begun = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert [turn.continues for turn in begun] == ["", begun[0].turn_id]
    assert inference.asked[1].ids == inference.asked[0].ids + inference.asked[0].cumulative[:10]


async def test_a_reply_whose_client_was_gone_at_its_end_is_given_to_one_equal_request_of_its_session(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ends, go_on, put, ended = asyncio.Event(), asyncio.Event(), TurnStore.put, Leaving.ended
    waiting: list[Any] = []

    async def held(facts: TurnStore, fact: Any, **options: Any) -> bool:
        if isinstance(fact, TurnFinished):
            ends.set()
            await go_on.wait()
        return await put(facts, fact, **options)

    async def noted(leaving: Leaving, *asked: Any) -> None:
        waiting.append(asked)
        await ended(leaving, *asked)

    monkeypatch.setattr(TurnStore, "put", held)
    asked: dict[str, Any] = {"model": "any", "messages": USER, "max_tokens": 5}
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (first, _),
    ):
        cut = asyncio.create_task(first.chat.completions.create(**asked))
        await ends.wait()  # its tokens are all there, and it is about to be stored
        cut.cancel()
        await asyncio.wait([cut])
        await until(lambda: bool(served.gateway._leaving._ends), "its connection is lost")
        monkeypatch.setattr(Leaving, "ended", noted)
        again = [asyncio.create_task(first.chat.completions.create(**asked)) for _ in range(2)]
        elsewhere = {"extra_headers": {"x-asyncrl-session": "another"}}
        again.append(asyncio.create_task(first.chat.completions.create(**asked, **elsewhere)))
        await until(lambda: len(waiting) == 3, "the equal ones are there")
        go_on.set()
        *same, other = await asyncio.gather(*again)
        same.append(await first.chat.completions.create(**asked))
    begun = [fact.turn_id for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert {one.id for one in [*same, other]} == {f"chatcmpl-{turn}" for turn in begun} and len(begun) == 4
    (given,) = [one for one in same if one.id == f"chatcmpl-{begun[0]}"]
    assert given._request_id == f"req_{begun[0]}" and len(inference.asked) == 4


async def test_a_reply_whose_client_goes_while_its_size_is_stored_is_given_to_an_equal_request(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ends, go_on, end, lost_of = asyncio.Event(), asyncio.Event(), Meter.end, actor.lost_of
    lost: list[asyncio.Future[None]] = []

    async def held(*arguments: Any, **options: Any) -> None:
        ends.set()
        await go_on.wait()
        await end(*arguments, **options)

    def noted(http: Any) -> asyncio.Future[None]:
        lost.append(lost_of(http))
        return lost[-1]

    monkeypatch.setattr(Meter, "end", held)
    monkeypatch.setattr(actor, "lost_of", noted)
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (first, _),
    ):
        cut = asyncio.create_task(first.chat.completions.create(model="any", messages=USER, max_tokens=5))
        await ends.wait()
        cut.cancel()
        await asyncio.wait([cut])
        await until(lost[0].done, "its connection is lost")
        go_on.set()
        given = await first.chat.completions.create(model="any", messages=USER, max_tokens=5)
    (begun,) = [fact.turn_id for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert given.id == f"chatcmpl-{begun}"


async def test_a_retry_that_says_so_gets_the_stored_reply_and_an_idempotency_key_stands_for_one_request(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (first, second),
    ):
        ask = first.chat.completions.create
        again, keyed = {"x-stainless-retry-count": "1"}, {"Idempotency-Key": "k1"}
        once = await ask(model="any", messages=USER, max_tokens=5)
        repeated = await ask(model="any", messages=USER, max_tokens=5, extra_headers=again)
        anew = await ask(model="any", messages=USER, max_tokens=5)
        assert once.id == repeated.id != anew.id
        assert once.choices[0].message.content == repeated.choices[0].message.content

        message = await second.messages.create(model="any", messages=USER, max_tokens=6, extra_headers=keyed)
        async with second.messages.stream(model="any", messages=USER, max_tokens=6, extra_headers=keyed) as stream:
            same = await stream.get_final_message()
        assert (message.id, message.content[0].text) == (same.id, same.content[0].text)
        with pytest.raises(anthropic.BadRequestError, match="with another request"):
            await second.messages.create(model="any", messages=USER, max_tokens=7, extra_headers=keyed)
        assert len(inference.asked) == 3
        go_on = in_two_halves(inference)
        keyed = {"Idempotency-Key": "k2"}
        under_way = asyncio.create_task(ask(model="any", messages=USER, max_tokens=8, extra_headers=keyed))
        await until(lambda: len(inference.asked) == 4, "it is under way")
        with pytest.raises(openai.InternalServerError, match="is running"):
            await ask(model="any", messages=USER, max_tokens=8, extra_headers=keyed)
        go_on.set()
        await under_way
        keyed = {"Idempotency-Key": "k3"}
        at_once = [ask(model="any", messages=USER, max_tokens=9, extra_headers=keyed) for _ in range(4)]
        got = await asyncio.gather(*at_once, return_exceptions=True)
        assert len({reply.id for reply in got if not isinstance(reply, BaseException)}) == 1
    assert len([fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]) == 5


async def test_several_gateways_on_one_port_know_each_others_histories(
    bus: Bus, connect: Connect, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    made = gateway_stage(stage, tmp_path / "model", inference, count=2)
    both = [Served(bus, made), Served(await connect(bus.run), made, 2)]
    for one in both:
        await one.start()
    await publish(bus, ready(inference))
    for number in range(12):
        messages = [{"role": "user", "content": "abcdefghijkl"[number]}]
        for _ in range(2):
            body = {"model": "any", "messages": messages, "max_tokens": 4}
            async with ClientSession(headers={"x-api-key": both[0].key}) as session:  # a connection of its own
                reply = await (await session.post(f"{both[0].address}/v1/chat/completions", json=body)).json()
            text = reply["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "abc"}]
    assert all(one.count("turns") > 0 for one in both)
    for one in both:
        await one.stop()
    begun = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert len(begun) == 24 and all(turn.rewritten == 0 for turn in begun)
    assert sum(bool(turn.parent) for turn in begun) == 12


async def test_a_response_is_followed_by_its_id_and_only_by_its_own_tenant(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    other, added = make_key("ben")
    await publish(bus, added)
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (first, _),
        sdks(served.address, other) as (stranger, _second),
    ):
        ask: dict[str, Any] = {"model": "any", "max_output_tokens": 4}
        one = await first.responses.create(input="abc", **ask)
        two = await first.responses.create(input="abcd", previous_response_id=one.id, **ask)
        three = await first.responses.create(input="abcde", previous_response_id=two.id, **ask)
        with pytest.raises(openai.NotFoundError, match="send all messages") as absent:
            await stranger.responses.create(input="abc", previous_response_id=three.id, **ask)
        assert absent.value.param == "previous_response_id"
        private = {"X-Asyncrl-Private": "1"}
        with pytest.raises(openai.NotFoundError):
            await first.responses.create(input="abc", previous_response_id=one.id, extra_headers=private, **ask)
        texts = ["abc", one.output_text, "abcd", two.output_text, "abcde", three.output_text, "abc"]
        whole = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
        await first.responses.create(input=whole, **ask)
    begun = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert [turn.parent for turn in begun[:3]] == ["", begun[0].turn_id, begun[1].turn_id]
    for before, after in zip(inference.asked[:2], inference.asked[1:3], strict=True):
        assert after.ids[: len(before.ids) + 4] == before.ids + before.cumulative
    assert (begun[3].parent, begun[3].rewritten) == (begun[2].turn_id, 0)  # all messages: the same history
