"""A stream that a stopping gateway cuts ends with an error event in the shape of its API."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from actors.gateway import handover
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from harness.gateways import Served, gateway_stage, in_two_halves, ready, stored_turns
from harness.sglang_like import LikeSGLang
from harness.stage import Stage, until
from topics.turns import TurnFinished

SAID = [{"role": "user", "content": "abc"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 9},
    "/v1/responses": {"input": SAID, "max_output_tokens": 9},
    "/v1/messages": {"messages": SAID, "max_tokens": 9},
}
LAST = {
    "/v1/chat/completions": 'data: {"error":{',
    "/v1/responses": "event: response.failed",
    "/v1/messages": "event: error",
}


async def test_streams_that_are_cut_end_with_an_error_event_and_requests_without_a_reply_are_overloaded(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(handover, "_LEAVE_S", 0.2)
    go_on, begun = in_two_halves(inference), asyncio.Semaphore(0)
    served = Served(bus, gateway_stage(stage, tmp_path / "model", inference))
    await served.start()
    await publish(bus, ready(inference))

    async def ask(path: str, *, stream: bool) -> tuple[int, str]:
        async with ClientSession(headers={"x-api-key": served.key}) as client:
            body = {"model": "any", "stream": stream, **ASKED[path]}
            async with client.post(f"{served.address}{path}", json=body) as answer:
                first = await answer.content.readline()
                begun.release()
                return answer.status, (first + await answer.read()).decode()

    kinds = [(path, stream) for path in ASKED for stream in (True, False)]
    asking = {kind: asyncio.create_task(ask(kind[0], stream=kind[1])) for kind in kinds}
    await until(lambda: len(inference.asked) == len(kinds), "all are asked")
    for _ in ASKED:
        await asyncio.wait_for(begun.acquire(), 60)  # of the streams
    await served.stop()
    for (path, stream), task in asking.items():
        status, text = await task
        if stream:
            assert (status, text.rstrip().rpartition("\n\n")[2].startswith(LAST[path])) == (200, True), text
        else:
            assert status in (503, 529) and "stops before this reply is whole" in text
    ends = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnFinished)]
    assert [end.finish for end in ends] == ["gone"] * len(kinds)
    go_on.set()
