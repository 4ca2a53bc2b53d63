"""Responses that are stored: retrieved, listed, referred to and deleted, with the stock SDK over HTTP."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.live.keys import make_key
from harness.gateways import gateway, turns_of
from harness.sdks import openai, sdks
from harness.sglang_like import Asked, LikeSGLang
from harness.stage import Stage
from topics.topic import TURNS
from topics.turns import REPLY_KEPT

TOOL: dict[str, Any] = {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}}
CALLED = '<think>\nhm\n</think>\n\nSee <tool_call>\n{"name": "find", "arguments": {}}\n</tool_call> and'
USER = {"role": "user", "content": "abc"}
ASK: dict[str, Any] = {"model": "any", "max_output_tokens": 9}


def calling(inference: LikeSGLang, tokenizer: TaskTokenizer) -> None:
    """Have the server answer each prompt with reasoning, text, a call, and text."""

    async def serve(asked: Asked) -> dict[str, Any]:
        return inference.answer(asked, [*tokenizer.encode(CALLED).tolist(), tokenizer.eos_ids[0]], "stop")

    inference.serve = serve


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_references_to_items_continue_the_tokens_of_their_reply(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, stream: bool
):
    async with gateway(bus, stage, tmp_path / "model", inference, tools=True) as served:
        calling(inference, TaskTokenizer.load(tmp_path / "model"))
        async with sdks(served.address, served.key) as (one, _):
            ask: dict[str, Any] = {"model": "any", "tools": [TOOL]}
            if stream:
                async with one.responses.stream(input=[USER], **ask) as events:
                    first = await events.get_final_response()
            else:
                first = await one.responses.create(input=[USER], **ask)
            call = next(item for item in first.output if item.type == "function_call")
            found = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
            references = [{"type": "item_reference", "id": item.id} for item in first.output]
            await one.responses.create(input=[USER, *references, found], **ask)
            retrieved = await one.responses.retrieve(first.id)
    assert {item.type for item in first.output} == {"reasoning", "message", "function_call"}
    assert [(item.type, item.id) for item in retrieved.output] == [(item.type, item.id) for item in first.output]
    assert retrieved.output_text == first.output_text and retrieved.usage == first.usage and first.store
    started, _ = await turns_of(bus)
    before, after = started.values()
    assert (after.parent, after.rewritten) == (before.turn_id, 0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_retry_stores_the_response_that_a_dead_gateway_did_not_store_and_no_deleted_one(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path, stream: bool
):
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (one, _),
    ):
        retry: Any = {"extra_headers": {"x-stainless-retry-count": "1"}}

        async def asked(more: dict[str, Any]) -> Any:
            answer = await one.responses.create(**ASK, input="abc", stream=stream, **more)
            return [event async for event in answer][-1].response if stream else answer

        first = await asked({})
        subject = REPLY_KEPT.subject(bus.run, first.id.removeprefix("resp_"))
        gone = {"filter": subject}  # as if the gateway had died before it stored the response
        await bus.api(f"STREAM.PURGE.{TURNS.full_name(bus.run)}", gone)
        with pytest.raises(openai.NotFoundError):
            await one.responses.retrieve(first.id)
        again = await asked(retry)
        retrieved = await one.responses.retrieve(first.id)
        await one.responses.delete(first.id)
        await asked(retry)
        with pytest.raises(openai.NotFoundError):
            await one.responses.retrieve(first.id)
    assert again.id == first.id and retrieved.output == first.output


async def test_the_items_of_a_request_are_listed_in_pages(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (one, _),
    ):
        said = [USER, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        first = await one.responses.create(model="any", max_output_tokens=9, input=said)
        text = await one.responses.create(model="any", max_output_tokens=9, input="abc")
        pages = [[item async for item in await one.responses.input_items.list(first.id, limit=2, order="asc")]]
        pages.append([item async for item in await one.responses.input_items.list(first.id)])
        (alone,) = (await one.responses.input_items.list(text.id)).data
    assert [item.content[0].text for item in pages[0]] == ["abc", "b", "c"]
    assert pages[1] == pages[0][::-1]
    assert (alone.role, alone.content[0].text, alone.content[0].type) == ("user", "abc", "input_text")


async def test_what_is_deleted_private_foreign_or_never_stored_is_absent(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (one, _),
    ):
        kept, deleted = [await one.responses.create(**ASK, input="abc", user=user) for user in ("ann", "bob")]
        await one.responses.delete(deleted.id)
        unstored = await one.responses.create(**ASK, input="abc", store=False)
        private = await one.responses.create(**ASK, input="abc", extra_headers={"x-asyncrl-private": "1"})
        key, added = make_key("eve")
        await publish(bus, added)
        await one.responses.retrieve(kept.id)
        async with sdks(served.address, key) as (eve, _):
            for client, name in ((eve, kept.id), (one, deleted.id), (one, unstored.id), (one, private.id)):
                with pytest.raises(openai.NotFoundError, match="is stored here"):
                    await client.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError):
            await one.responses.delete(deleted.id)
        reference: Any = {"type": "item_reference", "id": kept.output[0].id}
        with pytest.raises(openai.NotFoundError, match="no item"):  # of another user
            await one.responses.create(**ASK, input=[reference, USER], user="bob")
        await one.responses.create(**ASK, input=[reference, USER], user="ann")
        with pytest.raises(openai.BadRequestError, match=r"input\[0\].id is 5; expected the id of an item"):
            await one.responses.create(**ASK, input=[{"type": "item_reference", "id": 5}, USER])
    assert (kept.store, unstored.store, private.store) == (True, False, False)
