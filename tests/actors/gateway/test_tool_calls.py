"""A loop of tools with stock SDKs over the three APIs: calls come back as their APIs have them, and no id is lost."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.data.tokenizer import TaskTokenizer
from harness.gateways import gateway, stored_turns
from harness.sdks import anthropic, openai, sdks
from harness.sglang_like import Asked, LikeSGLang
from harness.stage import Stage
from topics.turns import TurnStarted

USER = [{"role": "user", "content": "abc"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "find", "description": "finds", "parameters": SCHEMA}
# Spaces as no template writes them: a history that is written anew would have other tokens.
REPLY = (
    'See <tool_call>{ "name":"find",  "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"arguments": {"b": "c"}, "name": "find"}</tool_call>'
)
ARGUMENTS = [{"a": 1}, {"b": "c"}]


def calling(inference: LikeSGLang, tokenizer: TaskTokenizer) -> None:
    """Have the server call two tools first, and then answer."""

    async def serve(asked: Asked) -> dict[str, Any]:
        text = tokenizer.decode_all(asked.ids)
        reply = "done" if "found" in text else REPLY
        stop = asked.sampling.get("stop")
        if stop and stop[0] in reply:
            reply = reply[: reply.index(stop[0]) + len(stop[0])]
            return inference.answer(asked, tokenizer.encode(reply).tolist(), "stop")
        return inference.answer(asked, [*tokenizer.encode(reply).tolist(), tokenizer.eos_ids[0]], "stop")

    inference.serve = serve


async def chat_loop(first: Any, _second: Any, stream: bool) -> str:
    ask: dict[str, Any] = {"model": "any", "tools": [{"type": "function", "function": FUNCTION}]}
    if stream:
        async with first.chat.completions.stream(messages=USER, **ask) as chunks:
            choice = (await chunks.get_final_completion()).choices[0]
    else:
        choice = (await first.chat.completions.create(messages=USER, **ask)).choices[0]
    calls = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "See")
    assert [json.loads(call.function.arguments) for call in calls] == ARGUMENTS
    results = [{"role": "tool", "tool_call_id": call.id, "content": "found"} for call in calls]
    said = choice.message.model_dump(exclude_none=True, exclude={"parsed"})
    done = await first.chat.completions.create(messages=[*USER, said, *results], **ask)
    return done.choices[0].message.content


async def responses_loop(first: Any, _second: Any, stream: bool) -> str:
    ask: dict[str, Any] = {"model": "any", "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}]}
    if stream:
        async with first.responses.stream(input=USER, **ask) as events:
            done = [event.item async for event in events if event.type == "response.output_item.done"]
            response = await events.get_final_response()
        assert [item.id for item in done] == [item.id for item in response.output]  # as Codex keeps them
    else:
        response = await first.responses.create(input=USER, **ask)
    calls = [item for item in response.output if item.type == "function_call"]
    assert (response.status, response.output_text) == ("completed", "See")
    assert [json.loads(call.arguments) for call in calls] == ARGUMENTS
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "found"} for call in calls]
    said = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
    return (await first.responses.create(input=[*USER, *said, *results], **ask)).output_text


async def messages_loop(_first: Any, second: Any, stream: bool) -> str:
    tool = {"name": "find", "description": "finds", "input_schema": SCHEMA}
    ask: dict[str, Any] = {"model": "any", "max_tokens": 300, "tools": [tool]}
    if stream:
        async with second.messages.stream(messages=USER, **ask) as events:
            message = await events.get_final_message()
    else:
        message = await second.messages.create(messages=USER, **ask)
    text, *calls = message.content
    assert (message.stop_reason, text.text) == ("tool_use", "See")
    assert [call.input for call in calls] == ARGUMENTS
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "found"} for call in calls]
    said = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}
    answer = await second.messages.create(messages=[*USER, said, {"role": "user", "content": results}], **ask)
    return answer.content[0].text


@pytest.mark.parametrize("loop", [chat_loop, responses_loop, messages_loop])
async def test_a_loop_of_two_parallel_calls_keeps_every_sampled_id(
    loop: Any, bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with gateway(bus, stage, tmp_path / "model", inference, tools=True) as served:
        calling(inference, TaskTokenizer.load(tmp_path / "model"))
        async with sdks(served.address, served.key) as (first, second):
            for stream in (False, True):
                assert await loop(first, second, stream) == "done"
    turns = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert [bool(turn.parent) for turn in turns] == [False, True, False, True]
    assert all(turn.rewritten == 0 for turn in turns)
    for before, after in (inference.asked[:2], inference.asked[2:]):
        history = before.ids + before.cumulative
        assert after.ids[: len(history)] == history and len(after.ids) > len(history)


async def test_one_call_where_a_request_allows_no_second_and_a_refusal_where_the_template_has_none(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    ask: dict[str, Any] = {"model": "any", "messages": USER, "tools": [{"type": "function", "function": FUNCTION}]}
    async with gateway(bus, stage, tmp_path / "model", inference, tools=True) as served:
        calling(inference, TaskTokenizer.load(tmp_path / "model"))
        async with sdks(served.address, served.key) as (first, second):
            one = await first.chat.completions.create(**ask, parallel_tool_calls=False)
            none = await first.chat.completions.create(**ask, tool_choice="none")
            tool = {"name": "find", "input_schema": SCHEMA}
            counted = await second.messages.count_tokens(model="any", messages=USER, tools=[tool])
            deep: dict[str, Any] = {}
            for _ in range(600):
                deep = {"a": deep}
            with pytest.raises(openai.BadRequestError, match="nested too deeply"):
                function = {"type": "function", "function": FUNCTION | {"parameters": deep}}
                await first.chat.completions.create(**ask | {"tools": [function]})
    assert [json.loads(call.function.arguments) for call in one.choices[0].message.tool_calls] == ARGUMENTS[:1]
    assert none.choices[0].message.content == REPLY and none.choices[0].message.tool_calls is None
    assert counted.input_tokens == one.usage.prompt_tokens == none.usage.prompt_tokens + len("find")

    async with (
        gateway(bus, stage, tmp_path / "plain", inference) as served,
        sdks(served.address, served.key) as (first, _),
    ):
        with pytest.raises(openai.BadRequestError, match="tools are not supported by the chat template") as refused:
            await first.chat.completions.create(**ask)
    assert refused.value.param == "tools"


async def test_the_tool_runner_of_an_sdk_sends_all_messages_where_no_thread_is_kept(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    called: list[Any] = []

    @anthropic.beta_async_tool
    async def find(a: int = 0, b: str = "") -> str:
        """finds"""
        called.append(a or b)
        return "found"

    ask: dict[str, Any] = {"model": "any", "max_tokens": 300, "messages": USER, "tools": [find]}
    async with gateway(bus, stage, tmp_path / "model", inference, tools=True) as served:
        calling(inference, TaskTokenizer.load(tmp_path / "model"))
        async with sdks(served.address, served.key) as (_, second):
            done = await second.beta.messages.tool_runner(**ask).until_done()
            alone = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
            one = await second.beta.messages.tool_runner(**ask, **alone).until_done()
            with pytest.raises(anthropic.BadRequestError, match="send all messages"):
                await second.beta.messages.thread(model="any", max_tokens=300).send(USER)
    assert ([*done.content, *one.content][0].text, called) == ("done", [1, "c", 1])
    turns = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert [(bool(turn.parent), turn.rewritten) for turn in turns] == [(False, 0), (True, 0)] * 2


async def test_results_of_tools_follow_a_response_by_its_id_and_other_tools_are_refused(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    tools = [{"type": "function", **FUNCTION}]
    async with gateway(bus, stage, tmp_path / "model", inference, tools=True) as served:
        calling(inference, TaskTokenizer.load(tmp_path / "model"))
        async with sdks(served.address, served.key) as (first, _):
            asked = await first.responses.create(model="any", input=USER, tools=tools)
            calls = [item.call_id for item in asked.output if item.type == "function_call"]
            results = [{"type": "function_call_output", "call_id": call, "output": "found"} for call in calls]
            ask: dict[str, Any] = {"model": "any", "input": results, "previous_response_id": asked.id}
            done = await first.responses.create(**ask, tools=tools)
            more = ask | {"input": "abc", "previous_response_id": done.id}
            await first.responses.create(**more, tools=tools)
            await first.responses.create(**more)
            for other in ([*tools, tools[0] | {"name": "send"}], [tools[0] | {"description": "sends"}]):
                with pytest.raises(openai.BadRequestError, match="are not those that the conversation") as refused:
                    await first.responses.create(**more, tools=other)
                assert refused.value.param == "tools"
    assert done.output_text == "done"
    turns = [fact for fact in await stored_turns(bus) if isinstance(fact, TurnStarted)]
    assert [turn.parent for turn in turns] == ["", turns[0].turn_id, *[turns[1].turn_id] * 2]
    assert len({turn.tools for turn in turns}) == 1
