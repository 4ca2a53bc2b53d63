"""Sessions over HTTP: feedback on a whole one, and agents that rewrite their replies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import ClientSession

from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.live.apis.schema import Call
from asyncrl.live.keys import make_key
from harness.audited import messages_on
from harness.gateways import Served, gateway, turns_of
from harness.sdks import sdks
from harness.sglang_like import LikeSGLang
from harness.stage import Stage
from topics.topic import TURNS
from topics.turns import FEEDBACK_GIVEN

USER = {"role": "user", "content": "abc"}


async def judge(served: Served, key: str = "", **fields: Any) -> tuple[int, dict[str, Any]]:
    async with (
        ClientSession(headers={"x-api-key": key or served.key}) as http,
        http.post(f"{served.address}/v1/feedback", json=fields) as response,
    ):
        return response.status, await response.json()


async def test_feedback_on_a_session_is_given_to_each_of_its_turns_but_side_ones(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    named = {"x-asyncrl-session": "my task"}
    live = {"discount": 0.5}
    async with (
        gateway(bus, stage, tmp_path / "model", inference, live=live) as served,
        sdks(served.address, served.key) as (one, two),
    ):
        ask: dict[str, Any] = {"model": "any", "messages": [USER]}
        first = await one.chat.completions.create(**ask, extra_headers=named)
        await one.chat.completions.create(**ask, extra_headers=named | {"x-asyncrl-turn-type": "side"})
        last = await two.messages.create(**ask, max_tokens=9, extra_headers=named)
        await one.chat.completions.create(**ask)  # of another session
        turns = [first.id.removeprefix("chatcmpl-"), last.id.removeprefix("msg_")]
        status, answer = await judge(served, session="my task", thumb="up", text="done")
        again = await judge(served, session="my task", thumb="up", text="done")
        other, added = make_key("eve")
        await publish(bus, added)
        unknown = await judge(served, session="your task", thumb="up")
        foreign = await judge(served, other, session="my task", thumb="up")
    assert status == 200 and answer["session"] == "my task"
    assert answer["turns"] == [{"turn": turns[0], "score": 0.5}, {"turn": turns[1], "score": 1.0}]
    assert again == (status, answer)
    given = (await messages_on(bus, TURNS)).on(FEEDBACK_GIVEN)
    assert sorted((one.turn_id, one.score, one.text) for one in given) == sorted(
        [(turns[0], 0.5, ""), (turns[1], 1.0, "done")]
    )
    assert [(status, body["error"]["param"]) for status, body in (unknown, foreign)] == [(404, "session")] * 2


async def test_an_agent_that_rewrites_its_replies_stays_in_one_session(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (one, _),
    ):
        messages = [{"role": "system", "content": "brief"}, USER]
        for number in range(3):
            ask: dict[str, Any] = {"model": "any", "messages": messages, "max_tokens": 9}
            said = (await one.chat.completions.create(**ask)).choices[0].message.content
            messages += [{"role": "assistant", "content": f"x{said}{number}"}, USER]
    started, _ = await turns_of(bus)
    assert len({turn.session for turn in started.values()}) == 1
    assert [(turn.parent, turn.rewritten) for turn in started.values()] == [("", 0), ("", 1), ("", 2)]


async def test_the_id_of_a_call_names_the_session_of_a_rewritten_conversation(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with (
        gateway(bus, stage, tmp_path / "model", inference, tools=True) as served,
        sdks(served.address, served.key) as (one, _),
    ):
        first = await one.chat.completions.create(model="any", max_tokens=9, messages=[USER])
        call = Call(f"call_{first.id.removeprefix('chatcmpl-')}_0", "find", {})
        shown = {"role": "assistant", "content": f"Calling tools: [{{'id': '{call.id}'}}]"}
        summary = {"role": "user", "content": "a summary of what came before"}
        await one.chat.completions.create(model="any", max_tokens=9, messages=[summary, shown, USER])
        forged = {"role": "assistant", "content": f"call_{'0' * 24}_0"}
        await one.chat.completions.create(model="any", max_tokens=9, messages=[summary, forged, USER])
    started, _ = await turns_of(bus)
    sessions = [turn.session for turn in started.values()]
    assert sessions[0] == sessions[1] != sessions[2]
