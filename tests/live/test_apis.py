"""Bodies of requests and replies of the three APIs, against examples written by hand."""

import msgspec
import pytest

from asyncrl.live.apis.registry import APIS, MESSAGES
from asyncrl.live.apis.response_items import resolved
from asyncrl.live.apis.schema import Call, Ending, LiveError, Request, assistant_message
from harness.live_apis import OPENING, parsed_events

USER = {"role": "user", "content": "Hi"}
MINIMAL = {
    "chat": {"model": "tiny", "messages": [USER]},
    "responses": {"model": "tiny", "input": "Hi"},
    "messages": {"model": "tiny", "messages": [USER], "max_tokens": 9},
    "completions": {"model": "tiny", "prompt": "Hi"},
}
ENDING = Ending("Hello", 3, "stop")
CUT = Ending("Hello", 3, "length")


def parse(api: str, **fields: object) -> Request:
    return APIS[api].parse(msgspec.json.encode(MINIMAL[api] | fields))


def stream(api: str, ending: Ending, **fields: object) -> list[tuple[str, dict]]:
    events = APIS[api].events(OPENING, parse(api, **fields))
    first = events.begin() + events.text("Hel") + events.text("lo")
    return parsed_events(first + events.end(ending) + events.done([ending]))


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_a_minimal_request_asks_for_nothing_of_its_own(api: str):
    request = parse(api)

    most, thoughts = (9, "") if api == "messages" else (None, "text")
    stored = {"store": True, "input": b'[{"role":"user","content":"Hi"}]'} if api == "responses" else {}
    assert request == Request("tiny", [USER], most, thoughts=thoughts, **stored)


def test_the_items_of_a_response_that_is_not_stored_are_not_kept():
    assert parse("responses").input and not parse("responses", store=False).input


def test_a_request_with_the_items_that_it_refers_to_has_the_bound_of_a_body():
    reference = {"type": "item_reference", "id": "msg_a"}
    body = msgspec.json.encode({"model": "tiny", "input": [reference, USER, reference]})
    item = {"id": "msg_a", "type": "message", "role": "assistant", "content": "b" * 1000}

    whole = msgspec.json.decode(resolved(body, {"msg_a": item}, 4000))
    with pytest.raises(LiveError, match="the items that it refers to is larger than 2,000 bytes") as refused:
        resolved(body, {"msg_a": item}, 2000)

    assert whole == {"model": "tiny", "input": [item, USER, item]}
    assert APIS["responses"].error(refused.value, "t")[0] == 413


def test_what_agents_always_send_and_no_reply_must_obey_is_ignored():
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    code = {"context_management": edits, "output_config": {"effort": "high"}}
    codex = {"client_metadata": {"a": "b"}, "reasoning": {"summary": None}, "include": ["file_search_call.results"]}
    codex |= {"truncation": "auto"}

    assert parse("messages", **code) == parse("messages")
    assert msgspec.structs.replace(parse("responses", **codex), repeated={}) == parse("responses")
    assert parse("chat", verbosity="low") == parse("chat")


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat", {"reasoning_effort": "none"}),
        ("responses", {"reasoning": {"effort": "none"}}),
        ("messages", {"thinking": {"type": "disabled"}}),
    ],
)
def test_a_request_without_reasoning_says_so_to_the_template(api: str, fields: dict):
    request = parse(api, **fields)

    assert not request.reasons and request.variables == {"enable_thinking": False, "thinking": False}
    assert parse(api).reasons and parse(api).variables == {}


def test_an_effort_and_variables_of_a_chat_reach_the_template():
    request = parse("chat", reasoning_effort="low", chat_template_kwargs={"enable_thinking": True})

    assert request.reasons and request.variables == {"enable_thinking": True, "reasoning_effort": "low"}


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_sampling_is_read_by_the_names_that_open_servers_know(api: str):
    request = parse(
        api,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        logit_bias={"7": -100, "8": 0},
        stop_token_ids=[3],
        return_token_ids=True,
    )

    assert (request.top_k, request.min_p, request.repetition_penalty) == (5, 0.1, 1.1)
    assert (request.logit_bias, request.stop_ids, request.token_ids) == ({"7": -100.0}, [3], True)
    assert parse(api, top_k=-1).top_k is parse(api, top_k=0).top_k is None


@pytest.mark.parametrize(("prompt", "raw"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])])
def test_a_completion_has_one_prompt_of_text_or_tokens(prompt: object, raw: object):
    assert parse("completions", prompt=prompt).raw == raw


def test_chat_completions_read_all_that_they_know():
    request = parse(
        "chat",
        messages=[
            {"role": "developer", "content": "Be short"},
            {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
            {"role": "assistant", "content": "C", "refusal": None},
            {"role": "user", "content": "D"},
        ],
        max_completion_tokens=5,
        max_tokens=6,
        temperature=1,
        top_p=0.5,
        stop="END",
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
        n=1,
        tools=[],
        user="somebody",
    )

    texts = [("system", "Be short"), ("user", "AB"), ("assistant", "C"), ("user", "D")]
    assert [(message["role"], message["content"]) for message in request.messages] == texts
    assert (request.max_tokens, request.temperature, request.top_p, request.seed) == (5, 1.0, 0.5, 3)
    assert (request.stop, request.stream, request.usage) == (["END"], True, True)


def test_responses_take_their_own_output_back():
    output = APIS["responses"].whole(OPENING, parse("responses"), [ENDING])["output"]

    request = parse("responses", instructions="Be short", input=[USER, *output, USER], max_output_tokens=4)

    replied = {"role": "assistant", "content": "Hello", "turn": OPENING.turn}
    assert request.messages == [{"role": "system", "content": "Be short"}, USER, replied, USER]
    assert request.max_tokens == 4


def test_a_response_repeats_what_was_asked():
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}]
    asked = {"tools": tools, "tool_choice": "auto", "temperature": 0.5, "instructions": "Be short", "metadata": {}}
    asked |= {"max_output_tokens": 4, "parallel_tool_calls": False, "previous_response_id": "resp_a", "user": "eve"}
    _, (_, first), *_, (_, last) = stream("responses", ENDING, **asked)

    for response in (first["response"], last["response"]):
        assert {name: response[name] for name in asked} == asked
    plain = APIS["responses"].whole(OPENING, parse("responses"), [ENDING])
    assert (plain["tool_choice"], plain["parallel_tool_calls"], plain["temperature"]) == ("auto", True, 1.0)


def test_messages_read_all_that_they_know():
    block = {"type": "text", "text": "Be short", "cache_control": {"type": "ephemeral"}}

    request = parse("messages", system=[block], stop_sequences=["A", "B"], top_k=5, temperature=0.0, stream=True)

    assert request.messages == [{"role": "system", "content": "Be short"}, USER]
    assert (request.stop, request.top_k, request.temperature, request.stream) == (["A", "B"], 5, 0.0, True)


def test_a_count_needs_no_limit_of_tokens_and_takes_none():
    counted = {"model": "tiny", "messages": [USER]}

    assert MESSAGES.parse_count(msgspec.json.encode(counted)) == Request("tiny", [USER])
    with pytest.raises(LiveError, match=r"max_tokens is not supported"):
        MESSAGES.parse_count(msgspec.json.encode(counted | {"max_tokens": 5}))


WRONG = [
    ("completions", {"prompt": ["a", "b"]}, "prompt", r"prompt has 2 prompts; send one in each request"),
    ("completions", {"prompt": ""}, "prompt", r"prompt is a text that is empty; expected a text"),
    ("completions", {"prompt": [1, "a"]}, "prompt", r"expected a list of token ids"),
    ("completions", {"echo": True}, "echo", r"echo is true, which this gateway does not support"),
    ("chat", {"logit_bias": {"a": 1}}, "logit_bias", r"expected at most 1024 token ids"),
    ("chat", {"logit_bias": {"1": 101}}, "logit_bias", r"numbers from -100 to 100"),
    ("chat", {"stop_token_ids": [-1]}, "stop_token_ids", r"stop_token_ids is \[-1\]; expected a list of token ids"),
    ("chat", {"chat_template_kwargs": [1]}, "chat_template_kwargs", r"expected an object of at most 16,384 bytes"),
    ("chat", {"reasoning_effort": 5}, "reasoning_effort", r"reasoning_effort is 5; expected a text"),
    ("chat", {"messages": []}, "messages", r"messages is \[\]; expected a list of objects"),
    ("chat", {"model": None}, "model", r"model is absent"),
    ("chat", {"temperature": "hot"}, "temperature", r'temperature is "hot"; expected a number from 0.0 to 2.0'),
    ("chat", {"temperature": True}, "temperature", r"temperature is true; expected a number"),
    ("chat", {"max_tokens": 0}, "max_tokens", r"max_tokens is 0; expected a whole number from 1 to"),
    ("chat", {"stream": 1}, "stream", r"stream is 1; expected true or false"),
    ("chat", {"stop": [""]}, "stop", r"expected a text that is not empty"),
    ("chat", {"stop": ["a", "b" * 513]}, "stop", r"has a text of more than 512 characters"),
    ("chat", {"n": 17}, "n", r"n is 17; expected a whole number from 1 to 16"),
    ("chat", {"n": True}, "n", r"n is true; expected a whole number"),
    ("chat", {"top_logprobs": 2}, "top_logprobs", r"of the sampled tokens are not asked for"),
    ("chat", {"top_logprobs": 21, "logprobs": True}, "top_logprobs", r"expected a whole number from 0 to 20"),
    ("responses", {"top_logprobs": 2}, "top_logprobs", r"of the sampled tokens are not asked for"),
    ("chat", {"tools": [{}]}, "tools[0]", r"tools\[0\] has no name"),
    ("chat", {"tools": 5}, "tools", r"tools is 5; expected a list of at most"),
    ("chat", {"tool_choice": "required"}, "tool_choice", r"and there are no tools"),
    (
        "chat",
        {"tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        r"expected auto, none, r",
    ),
    ("chat", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice", r"expected auto, none, required, or function"),
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format", r"json_schema with a schema"),
    ("chat", {"response_format": "json"}, "response_format", r'is "json"; expected the type text, json_object'),
    ("responses", {"text": {"form": 1}}, "text", r"expected a format, a verbosity, or both"),
    ("responses", {"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format", r"with a schema"),
    ("chat", {"novel": 1}, "novel", r"novel is not supported by this gateway"),
    ("chat", {"messages": [{"role": "tool", "content": ""}]}, "messages[0]", r"names no call: expected the id of one"),
    ("chat", {"messages": [{"role": "tools", "content": ""}]}, "messages[0].role", r"expected one of system"),
    ("chat", {"messages": [USER, {"role": "assistant", "content": "x"}]}, "messages", r"does not continue a reply"),
    ("chat", {"messages": [{"role": "system", "content": "x"}]}, "messages", r"has no message of a user"),
    ("chat", {"messages": [USER | {"content": None}]}, "messages[0].content", r"is null; expected a text"),
    ("chat", {"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls", r"in a message of this role"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
        r'has the type "image_url"; this gateway takes text',
    ),
    ("chat", {"stream_options": 1}, "stream_options", r"expected {\"include_usage\""),
    ("responses", {"input": 5}, "input", r"input is 5; expected a list of objects"),
    ("responses", {"previous_response_id": 5}, "previous_response_id", r"is 5; expected the id of a response"),
    ("responses", {"input": [{"type": "file"}]}, "input[0].type", r'is "file"; this gateway takes'),
    ("responses", {"input": [{"type": "reasoning"}]}, "input", r"ends with a message of the assistant"),
    ("responses", {"input": [{"type": "reasoning", "summary": 5}]}, "input[0].summary", r"is 5; expected a list"),
    ("responses", {"input": [{"type": "function_call"}]}, "input[0]", r"is no call: expected an id, a name"),
    ("responses", {"tools": [{"type": "shell"}]}, "tools[0].type", r"knows functions with a schema"),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", r"functions with a schema"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice", r"and there are no tools"),
    ("messages", {"tool_choice": "auto"}, "tool_choice", r"expected one with a type"),
    ("messages", {"max_tokens": None}, "max_tokens", r"max_tokens is absent"),
    ("messages", {"temperature": 1.5}, "temperature", r"expected a number from 0.0 to 1.0"),
    ("messages", {"output_config": {"format": {}}}, "output_config.format", r"with a schema"),
    ("messages", {"output_config": "high"}, "output_config", r"expected an effort, a format, or both"),
    (
        "messages",
        {"messages": [USER | {"content": [{"type": "tool_result"}]}]},
        "messages[0].content",
        r"names no call",
    ),
]


@pytest.mark.parametrize(("api", "fields", "field", "words"), WRONG)
def test_what_is_wrong_or_unknown_is_refused_by_name(api: str, fields: dict, field: str, words: str):
    with pytest.raises(LiveError, match=words) as caught:
        parse(api, **fields)

    assert caught.value.field == field
    assert str(caught.value).startswith(field)
    assert APIS[api].error(caught.value, "t1")[0] == 400


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000, b'"x"', b"\xff"])
def test_a_body_that_is_no_json_object_is_refused(api: str, body: bytes):
    with pytest.raises(LiveError, match=r"send a JSON object"):
        APIS[api].parse(body)


def test_refusals_have_the_shape_of_their_api():
    error = LiveError("key", "no such key", field="x")

    openai = {"message": "no such key", "type": "invalid_request_error", "param": "x", "code": "invalid_api_key"}
    assert APIS["chat"].error(error, "t1") == APIS["responses"].error(error, "t1") == (401, {"error": openai})
    anthropic = {"type": "authentication_error", "message": "no such key"}
    assert APIS["messages"].error(error, "t1") == (401, {"type": "error", "error": anthropic, "request_id": "req_t1"})


def test_overload_is_never_a_429():
    statuses = {name: api.error(LiveError("overloaded", "full"), "t1")[0] for name, api in APIS.items()}

    assert statuses == {"chat": 503, "responses": 503, "messages": 529, "completions": 503}


@pytest.mark.parametrize(("ending", "finish"), [(ENDING, "stop"), (CUT, "length")])
def test_chat_completions_as_chunks(ending: Ending, finish: str):
    events = stream("chat", ending, stream=True, stream_options={"include_usage": True})

    assert all(name == "" and data["id"] == "chatcmpl-t1" for name, data in events)
    *chunks, last = [data for _, data in events]
    deltas = [(chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) for chunk in chunks]
    first = {"role": "assistant", "content": ""}
    assert deltas == [(first, None), ({"content": "Hel"}, None), ({"content": "lo"}, None), ({}, finish)]
    assert last["choices"] == []
    cached = last["usage"].pop("prompt_tokens_details")
    assert last["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert cached == {"cached_tokens": ending.cached}
    assert APIS["chat"].whole(OPENING, parse("chat"), [ending])["choices"][0]["finish_reason"] == finish


def test_chat_completions_end_with_done_and_give_usage_only_when_asked():
    events = APIS["chat"].events(OPENING, parse("chat", stream=True))
    end = events.end(ENDING) + events.done([ENDING])

    assert end.endswith(b"data: [DONE]\n\n")
    assert len(parsed_events(end)) == 1


@pytest.mark.parametrize(("ending", "status"), [(ENDING, "completed"), (CUT, "incomplete")])
def test_responses_as_events(ending: Ending, status: str):
    events = stream("responses", ending)

    before = ["created", "in_progress", "output_item.added", "content_part.added"]
    text = ["output_text.delta"] * 2 + ["output_text.done", "content_part.done", "output_item.done"]
    assert [name for name, _ in events] == [f"response.{name}" for name in [*before, *text, status]]
    assert [data["sequence_number"] for _, data in events] == list(range(10))
    assert all(data["type"] == name for name, data in events)
    response = events[-1][1]["response"]
    assert response == APIS["responses"].whole(OPENING, parse("responses"), [ending])
    assert response["output"][0]["content"][0]["text"] == "Hello"
    assert (response["usage"]["total_tokens"], response["status"]) == (10, status)


def test_an_item_of_a_response_ends_before_the_next_one_begins_and_all_come_back_as_one_message():
    calls = [Call("call_1", "find", {"a": 1}), Call("call_2", "find", {"b": 2})]
    events = APIS["responses"].events(OPENING, parse("responses"))
    sent = events.begin() + events.text("See") + events.call(calls[0]) + events.text(" and") + events.call(calls[1])
    got = parsed_events(sent + events.end(Ending("See and", 9, "stop", calls=calls)))

    names = [name.removeprefix("response.") for name, _ in got]
    items = [data["item"] for name, data in got if name == "response.output_item.done"]
    marks = [name for name in names if name.startswith("output_item.")]
    assert marks == ["output_item.added", "output_item.done"] * 4
    assert [item["type"] for item in items] == ["message", "function_call"] * 2
    assert got[-1][1]["response"]["output"] == items and len({item["id"] for item in items}) == 4
    assert [data["output_index"] for name, data in got if name == "response.output_item.done"] == [0, 1, 2, 3]
    result = {"type": "function_call_output", "call_id": "call_1", "output": "found"}
    whole = APIS["responses"].whole(OPENING, parse("responses"), [Ending("See and", 9, "stop", calls=calls)])["output"]
    for output in (items, whole):
        _, said, _ = parse("responses", input=[USER, *output, result]).messages
        assert said == assistant_message("See and", calls, turn="t1")


STOPS = [
    (ENDING, "end_turn", None),
    (CUT, "max_tokens", None),
    (Ending("Hello", 3, "stop", "END"), "stop_sequence", "END"),
]


@pytest.mark.parametrize(("ending", "reason", "sequence"), STOPS)
def test_messages_as_events(ending: Ending, reason: str, sequence: str | None):
    events = stream("messages", ending)

    text = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    assert [name for name, _ in events] == ["message_start", "ping", *text, "message_delta", "message_stop"]
    assert events[0][1]["message"]["usage"]["input_tokens"] == 7
    assert events[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert events[-2][1]["usage"] == {"input_tokens": 7, "cache_read_input_tokens": 0, "output_tokens": 3}
    whole = APIS["messages"].whole(OPENING, parse("messages"), [ending])
    assert whole["content"] == [{"type": "text", "text": "Hello"}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)


def test_a_message_without_text_has_no_block():
    events = APIS["messages"].events(OPENING, parse("messages", stream=True))

    names = [name for name, _ in parsed_events(events.begin() + events.end(Ending("", 1, "stop")))]
    assert names == ["message_start", "ping", "message_delta", "message_stop"]
