"""Calls that are forced, reasoning, and JSON: stock SDKs over the three APIs, and the tokens that are stored."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.data.tokenizer import TaskTokenizer
from harness.gateways import gateway, stored_turns
from harness.sdks import openai, sdks
from harness.sglang_like import Asked, LikeSGLang
from harness.stage import Stage
from topics.turns import TurnFinished, TurnStarted

USER = [{"role": "user", "content": "abc"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"name": name, "description": "", "parameters": SCHEMA} for name in ("find", "send")]
CHAT_TOOLS = [{"type": "function", "function": tool} for tool in TOOLS]
RESPONSE_TOOLS = [{"type": "function", **tool} for tool in TOOLS]
MESSAGE_TOOLS = [{"name": tool["name"], "input_schema": SCHEMA} for tool in TOOLS]


def saying(inference: LikeSGLang, tokenizer: TaskTokenizer, replies: Callable[[str], str]) -> None:
    """Have the server answer each prompt with a text."""

    async def serve(asked: Asked) -> dict[str, Any]:
        reply = tokenizer.encode(replies(tokenizer.decode_all(asked.ids))).tolist()
        return inference.answer(asked, [*reply, tokenizer.eos_ids[0]], "stop")

    inference.serve = serve


def rest_of_a_call(prompt: str) -> str:
    """Go on from where a forced call begins."""
    if prompt.endswith('"arguments":'):
        return ' {"a": 1}}</tool_call>'
    return 'send", "arguments": {"a": 1}}</tool_call>' if prompt.endswith('"name": "') else "done"


async def chat(first: Any, _second: Any, forced: str, stream: bool) -> tuple[str, Any, Any]:
    choice: Any = {"type": "function", "function": {"name": forced}} if forced else "required"
    ask = {"model": "any", "tools": CHAT_TOOLS}
    if stream:
        async with first.chat.completions.stream(messages=USER, **ask, tool_choice=choice) as chunks:
            message = (await chunks.get_final_completion()).choices[0].message
    else:
        message = (await first.chat.completions.create(messages=USER, **ask, tool_choice=choice)).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "found"}
    said = message.model_dump(exclude_none=True, exclude={"parsed"})
    await first.chat.completions.create(messages=[*USER, said, result], **ask)
    return call.function.name, json.loads(call.function.arguments), message.content or None


async def responses(first: Any, _second: Any, forced: str, stream: bool) -> tuple[str, Any, Any]:
    choice: Any = {"type": "function", "name": forced} if forced else "required"
    ask = {"model": "any", "tools": RESPONSE_TOOLS}
    if stream:
        async with first.responses.stream(input=USER, **ask, tool_choice=choice) as events:
            (call,) = (await events.get_final_response()).output
    else:
        (call,) = (await first.responses.create(input=USER, **ask, tool_choice=choice)).output
    said = call.model_dump(exclude_none=True, exclude={"parsed_arguments"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
    await first.responses.create(input=[*USER, said, result], **ask)
    return call.name, json.loads(call.arguments), None


async def messages(_first: Any, second: Any, forced: str, stream: bool) -> tuple[str, Any, Any]:
    choice = {"type": "tool", "name": forced} if forced else {"type": "any"}
    ask: dict[str, Any] = {"model": "any", "max_tokens": 300, "tools": MESSAGE_TOOLS}
    if stream:
        async with second.messages.stream(messages=USER, **ask, tool_choice=choice) as events:
            message = await events.get_final_message()
    else:
        message = await second.messages.create(messages=USER, **ask, tool_choice=choice)
    (call,) = message.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "found"}
    said = {"role": "assistant", "content": [call.model_dump(exclude_none=True)]}
    await second.messages.create(messages=[*USER, said, {"role": "user", "content": [result]}], **ask)
    return call.name, call.input, None


async def test_a_forced_call_begins_with_tokens_of_the_prompt_and_is_continued(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with gateway(bus, stage, tmp_path / "model", inference, tools=True) as served:
        tokenizer = TaskTokenizer.load(tmp_path / "model")
        saying(inference, tokenizer, rest_of_a_call)
        async with sdks(served.address, served.key) as clients:
            for api in (chat, responses, messages):
                for stream in (False, True):
                    assert await api(*clients, "find", stream) == ("find", {"a": 1}, None)
                    assert await api(*clients, "", stream) == ("send", {"a": 1}, None)
    begun = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert len(begun) == 24
    for called, after, first, second in zip(begun[::2], begun[1::2], *[iter(inference.asked)] * 2, strict=False):
        assert after.parent == called.turn_id and after.skip is called.skip is None
        assert tokenizer.decode_all(called.tokens.tolist()).endswith(('"arguments":', '"name": "'))
        assert first.ids == called.tokens.tolist() and second.ids[: after.known] == first.ids + first.cumulative


THOUGHT, SAID = "hm, so", "Yes"


async def test_reasoning_is_told_apart_and_a_history_goes_on_with_its_ids_with_and_without_it(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    ask: dict[str, Any] = {"model": "any"}
    thinking = {"model": "any", "max_tokens": 300, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    asked = {"model": "any", "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    async with gateway(bus, stage, tmp_path / "model", inference, tools=True) as served:
        tokenizer = TaskTokenizer.load(tmp_path / "model")
        saying(inference, tokenizer, lambda _: f"<think> {THOUGHT} </think>  {SAID}")
        async with sdks(served.address, served.key) as (first, second):
            whole = (await first.chat.completions.create(messages=USER, **ask)).choices[0].message
            chunks = [one async for one in await first.chat.completions.create(messages=USER, **ask, stream=True)]
            response = await first.responses.create(input=USER, **ask)
            async with first.responses.stream(input=USER, **asked) as events:
                summed = await events.get_final_response()
            message = await second.messages.create(messages=USER, **thinking)
            async with second.messages.stream(messages=USER, **thinking) as stream:
                streamed = await stream.get_final_message()
            plain = await second.messages.create(messages=USER, model="any", max_tokens=300)
            turns = [fact.turn_id for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
            # With and without: the newest turn that said so, and where the client names one, that.
            said = {"role": "assistant", "content": SAID}
            await first.chat.completions.create(messages=[*USER, said, *USER], **ask)
            output = [item.model_dump(exclude_none=True) for item in summed.output]
            await first.responses.create(input=[*USER, *output, *USER], **ask)
            blocks = {"role": "assistant", "content": [one.model_dump(exclude_none=True) for one in message.content]}
            await second.messages.create(messages=[*USER, blocks, *USER], **thinking)
            forged = [block | {"signature": "0" * 24} if "signature" in block else block for block in blocks["content"]]
            await second.messages.create(messages=[*USER, {"role": "assistant", "content": forged}, *USER], **thinking)
    thought = "".join((chunk.choices[0].delta.model_extra or {}).get("reasoning_content", "") for chunk in chunks)
    assert whole.reasoning_content == thought == THOUGHT
    assert whole.content == "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
    assert [item.type for item in response.output] == [item.type for item in summed.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == summed.output[0].summary[0].text == THOUGHT
    assert (summed.output[0].encrypted_content, response.output[0].encrypted_content) == (turns[3], None)
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    for found, turn in ((message, turns[4]), (streamed, turns[5])):
        assert [block.type for block in found.content] == ["thinking", "text"]
        assert (found.content[0].thinking, found.content[0].signature) == (THOUGHT, turn)
    assert [block.text for block in plain.content] == [SAID]
    after = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)][7:]
    assert [fact.parent for fact in after] == [turns[6], turns[3], turns[4], turns[6]]
    assert all(fact.rewritten == 0 for fact in after)


async def test_a_count_is_of_the_ids_that_the_next_prompt_has(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    said = [*USER, {"role": "assistant", "content": SAID}, *USER]
    async with gateway(bus, stage, tmp_path / "model", inference, tools=True) as served:
        tokenizer = TaskTokenizer.load(tmp_path / "model")
        saying(inference, tokenizer, lambda _: f"<think> {THOUGHT} </think>  {SAID}")
        async with sdks(served.address, served.key) as (_, second):
            for headers in ({"X-Asyncrl-Private": "1"}, {"x-asyncrl-user": "eve"}, {}):
                ask: dict[str, Any] = {"model": "any", "extra_headers": headers}
                await second.messages.create(messages=USER, max_tokens=300, **ask)
                counted = await second.messages.count_tokens(messages=said, **ask)
                usage = (await second.messages.create(messages=said, max_tokens=300, **ask)).usage
                assert counted.input_tokens == usage.input_tokens > len(THOUGHT)


async def test_a_form_is_forced_by_the_engine_begun_anew_where_it_was_cut_and_not_trained(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    cut = True

    async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        nonlocal cut
        tokens = [*tokenizer.encode('{"a": 1}').tolist(), tokenizer.eos_ids[0]]
        yield inference.answer(asked, tokens[:4], "abort" if cut else None)
        if not cut:
            yield inference.answer(asked, tokens[4:], "stop")
        cut = False

    async with gateway(bus, stage, tmp_path / "model", inference, tools=True) as served:
        tokenizer, inference.events = TaskTokenizer.load(tmp_path / "model"), events
        async with sdks(served.address, served.key) as (first, second):
            async with first.chat.completions.stream(model="any", messages=USER, response_format=form) as chunks:
                texts = [(await chunks.get_final_completion()).choices[0].message.content]
            text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
            texts.append((await first.responses.create(model="any", input="abc", text=text)).output_text)
            config = {"format": {"type": "json_schema", "schema": SCHEMA}}
            asked = {"model": "any", "messages": USER, "max_tokens": 300, "extra_body": {"output_config": config}}
            texts.append((await second.messages.create(**asked)).content[0].text)
            with pytest.raises(openai.BadRequestError, match="send one of the two"):
                await first.chat.completions.create(
                    model="any", messages=USER, response_format=form, tools=CHAT_TOOLS, tool_choice="required"
                )
    assert [json.loads(text) for text in texts] == [{"a": 1}] * 3
    assert [json.loads(one.sampling["json_schema"]) for one in inference.asked] == [SCHEMA] * 4
    assert [len(one.ids) for one in inference.asked] == [3] * 4  # no token of the cut one
    facts = await stored_turns(bus)
    assert [fact.skip for fact in facts if isinstance(fact, TurnStarted)] == ["constrained"] * 3
    assert len({fact.tokens.tobytes() for fact in facts if isinstance(fact, TurnFinished)}) == 1
