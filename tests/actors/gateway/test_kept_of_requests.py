"""A request under way keeps nothing large of its body: hundreds of them wait at once."""

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession

from actors.gateway.turn import Turn
from asyncrl.bus.connection import Bus
from asyncrl.live.apis.body import MOST_SCHEMA_CHARS
from asyncrl.live.apis.registry import APIS
from asyncrl.live.apis.schema import LiveError
from harness.gateways import gateway, in_two_halves
from harness.sglang_like import LikeSGLang
from harness.stage import Stage, until

LONG = "x" * 2**20
BODY = {"model": "any", "input": "abc", "max_output_tokens": 20, "temperature": 0.5}
LARGE: dict[str, dict[str, Any]] = {
    "metadata": {"metadata": {"a": LONG}},
    "user": {"user": LONG},
    "tools that are left out": {"tools": [{"type": "namespace", "name": LONG}]},
    "several": {"metadata": {"a": LONG[: 2**17]}, "user": LONG[: 2**17]},
}


def turns() -> list[Turn]:
    """Return those of this process; tests before may have left some."""
    return [one for one in gc.get_objects() if isinstance(one, Turn)]


@pytest.mark.parametrize("kind", LARGE)
async def test_what_is_large_is_neither_kept_nor_repeated(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, kind: str
):
    go_on = in_two_halves(inference)
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        ClientSession(served.address, headers={"x-api-key": served.key}) as http,
    ):
        before = turns()
        asked = asyncio.create_task(http.post("/v1/responses", json=BODY | LARGE[kind]))
        await until(lambda: bool(inference.asked), "an engine answers")
        (turn,) = [one for one in turns() if all(one is not other for other in before)]
        assert len(msgspec.json.encode(turn.request)) < 2**18 + 2**12
        go_on.set()
        whole = await (await asked).read()
    assert len(whole) < 2**18 + 2**12
    assert msgspec.json.decode(whole)["temperature"] == 0.5


def test_what_a_turn_needs_of_its_request_is_kept():
    tool = {"name": "find", "description": LONG, "parameters": {"type": "object"}}
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": tool}],
    }

    kept = APIS["chat"].parse(msgspec.json.encode(body | {"user": "u", "stop": "b"})).without_prompt()

    assert (kept.messages, kept.user, kept.stop) == ([], "", ["b"])
    assert [one["function"]["name"] for one in kept.tools] == ["find"]


def test_a_schema_of_which_no_engine_should_make_a_grammar_is_refused():
    form = {"type": "json_schema", "json_schema": {"schema": {"description": "x" * MOST_SCHEMA_CHARS}}}
    body = {"model": "any", "messages": [{"role": "user", "content": "a"}], "response_format": form}

    with pytest.raises(LiveError, match="at most 131,072 are taken"):
        APIS["chat"].parse(msgspec.json.encode(body))
