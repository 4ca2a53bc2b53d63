"""Turns under way of a gateway that the run has no more, or that is asked to leave, get their end."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientError, ClientSession

from actors.gateway import claims
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish
from asyncrl.live.keys import make_key
from asyncrl.ports import free_port
from asyncrl.process import ChildProcess
from harness.gateways import Served, gateway_stage, in_two_halves, ready, stored_turns
from harness.live_runs import answers
from harness.sglang_like import LikeSGLang
from harness.stage import Stage, until
from topics.turns import TURN_CLAIMED, TurnFinished, TurnStarted

FIRST, MOST = 70, 90  # tokens until the engine stops, and in all
BODY: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "abc"}], "max_tokens": MOST}


class Second:
    """The second of two gateways, a process of its own with a reply under way, whose first tokens are stored."""

    def __init__(self, made: Stage, process: ChildProcess, client: ClientSession, reply: asyncio.Task[Any]) -> None:
        self.made, self.process, self.client, self.reply = made, process, client, reply

    async def is_over(self) -> None:
        """Wait for its end, and that of its connection."""
        await self.process.wait()
        with contextlib.suppress(ClientError):
            await (await self.reply).read()


@pytest.fixture
async def second(bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path) -> AsyncIterator[Second]:
    go_on = in_two_halves(inference, FIRST)
    made = gateway_stage(stage, tmp_path / "model", inference, count=2)
    process = await made.start("gateway", 2)
    address = f"http://127.0.0.1:{made.config.gateway.port}"
    await until(lambda: answers(address), "it listens")
    key, added = make_key("anna")
    for message in (added, ready(inference)):
        await publish(bus, message)
    async with ClientSession(address, headers={"x-api-key": key}) as client:

        async def known() -> bool:
            return (await client.get("/v1/models")).status == 200

        async def stored() -> bool:
            return len(await stored_turns(bus)) == 2

        await until(known, "it knows the key")
        reply = asyncio.create_task(client.post("/v1/chat/completions", json=BODY | {"stream": True}))
        await until(stored, "its first tokens are stored")
        yield Second(made, process, client, reply)
        go_on.set()
        reply.cancel()


async def ends(bus: Bus) -> list[TurnFinished]:
    return [fact for fact in await stored_turns(bus) if isinstance(fact, TurnFinished)]


async def test_the_next_gateway_ends_what_a_killed_one_had_under_way_that_the_run_has_no_more(bus: Bus, second: Second):
    second.process.kill()
    await second.is_over()
    made = second.made
    assert not await ends(bus) and (made.files.spool / "gateway-2").exists()
    fewer = msgspec.structs.replace(made.config.gateway, count=1)
    made.config = msgspec.structs.replace(made.config, gateway=fewer)
    left = Served(bus, made)
    await left.start()
    (end,) = await ends(bus)
    assert (end.finish, len(end.tokens)) == ("gone", FIRST) and left.count("turns_cut") == 1
    assert [path.name for path in made.files.spool.iterdir()] == ["gateway-1"]
    await left.stop()


async def test_a_request_that_asks_a_gateway_which_is_killed_instead_of_an_answer_goes_on_with_its_turn(
    bus: Bus, second: Second, inference: LikeSGLang, monkeypatch: pytest.MonkeyPatch
):
    made = second.made
    elsewhere = msgspec.structs.replace(made.config.gateway, port=free_port())
    made.config = msgspec.structs.replace(made.config, gateway=elsewhere)
    monkeypatch.setattr(claims, "_LIMIT_S", 10.0)  # in which it is killed here
    left = Served(bus, made)
    await left.start()
    second.process.send_signal(signal.SIGSTOP)
    inference.events = inference.one_event
    path = f"{left.address}/v1/chat/completions"
    again = asyncio.create_task(second.client.post(path, json=BODY))

    async def claimed() -> bool:
        return await read_last(bus, TURN_CLAIMED) is not None

    await until(claimed, "the stopped gateway is asked")
    second.process.kill()
    assert (await (await again).json())["usage"]["completion_tokens"] == MOST
    begun = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert [turn.continues for turn in begun] == ["", begun[0].turn_id]
    await left.stop()


async def test_a_gateway_that_is_asked_to_leave_ends_its_turns_and_the_one_that_stays_goes_on_with_them(
    bus: Bus, second: Second, inference: LikeSGLang
):
    stays = Served(bus, second.made)
    await stays.start()
    second.process.send_signal(signal.SIGTERM)
    await second.is_over()
    (end,) = await ends(bus)
    assert (end.finish, len(end.tokens)) == ("gone", FIRST)
    inference.events = inference.one_event
    reply = await second.client.post("/v1/chat/completions", json=BODY)
    assert (await reply.json())["usage"]["completion_tokens"] == MOST
    begun = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert [turn.continues for turn in begun] == ["", begun[0].turn_id]
    assert len(inference.asked[1].ids) == len(begun[0].tokens) + FIRST
    await stays.stop()
