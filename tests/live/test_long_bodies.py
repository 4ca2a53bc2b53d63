"""Bodies that take long to read are read in a time that grows with their size alone, or refused."""

import json
import time
from typing import Any

import msgspec
import pytest

from asyncrl.live.apis.body import MOST_VALUES, values_in
from asyncrl.live.apis.registry import APIS
from asyncrl.live.apis.schema import LiveError
from asyncrl.live.tenant_keys import user_of

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TEXT = {"type": "text", "text": "a"}
SAID = {"role": "assistant", "content": "a"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "d"}


def messages(role: str, *blocks: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "messages", {"max_tokens": 9, "messages": [USER, {"role": role, "content": [*blocks]}, USER]}


LONG = {
    "thinking and text": lambda n: messages("assistant", *[{"type": "thinking", "thinking": "a"}, TEXT] * n),
    "calls and text": lambda n: messages("assistant", *[USE] * n, *[TEXT] * n),
    "results and text": lambda n: messages("user", *[RESULT] * n, *[TEXT] * n),
    "calls": lambda n: ("responses", {"input": [USER, *[CALL] * n, USER]}),
    "text between calls": lambda n: (
        "responses",
        {"input": [*[CALL, {"role": "assistant", "content": "a"}] * n, USER]},
    ),
}


def cpu_s(api: str, fields: dict[str, Any]) -> float:
    """Return the least time on a core that a body took of three tries."""
    raw, taken = msgspec.json.encode({"model": "tiny"} | fields), []
    for _ in range(3):
        begun = time.thread_time()
        APIS[api].parse(raw)
        taken.append(time.thread_time() - begun)
    return min(taken)


@pytest.mark.parametrize("kind", LONG)
def test_a_body_of_eight_times_the_parts_takes_no_square_of_that(kind: str):
    short, long = (cpu_s(*LONG[kind](count)) for count in (250, 2000))

    assert long < 24 * short


BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "tiny", "messages": [USER]},
    "responses": {"model": "tiny", "input": "Hi"},
    "messages": {"model": "tiny", "messages": [USER], "max_tokens": 9},
    "completions": {"model": "tiny", "prompt": "Hi"},
}


def called(api: str, arguments: str) -> dict[str, Any]:
    """Return a body with two calls."""
    function = {"name": "f", "arguments": arguments}
    if api == "messages":
        return BODIES[api] | {
            "messages": [USER, {"role": "assistant", "content": [USE | {"input": arguments}] * 2}, USER]
        }
    if api == "responses":
        return BODIES[api] | {"input": [USER, *[CALL | {"arguments": arguments}] * 2, USER]}
    said = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}] * 2}
    return BODIES[api] | {"messages": [USER, said, USER]}


def fault_of(api: str, body: bytes) -> LiveError:
    with pytest.raises(LiveError) as refused:
        APIS[api].parse(body)
    return refused.value


@pytest.mark.parametrize("value", ["[]", "{}", "0", '""', '{"":[]}'])
@pytest.mark.parametrize("api", APIS)
def test_a_body_with_too_many_values_is_refused_before_it_is_read(
    api: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    more = msgspec.Raw(f"[{','.join([value] * (MOST_VALUES + 2))}]".encode())
    raw = msgspec.json.encode(BODIES[api] | {"metadata": {"a": more}})
    monkeypatch.setattr(msgspec.json, "decode", None)

    error = fault_of(api, raw)

    assert "more than 131,072 values" in str(error) and APIS[api].error(error, "t")[0] == 413


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_values_in_the_arguments_of_calls_count_together(api: str):
    half = json.dumps({"a": [[]] * (MOST_VALUES // 4)})

    assert "more than 131,072 values" in str(fault_of(api, msgspec.json.encode(called(api, half))))
    assert APIS[api].parse(msgspec.json.encode(called(api, json.dumps({"a": [[]] * (MOST_VALUES // 8)}))))


def test_what_stands_in_texts_does_not_count():
    text = '[{",\\\\"},' * MOST_VALUES

    assert values_in(msgspec.json.encode([text, {"a": "\\", "b": '"'}])) == 4
    (message,) = (
        APIS["chat"].parse(msgspec.json.encode({"model": "tiny", "messages": [USER | {"content": text}]})).messages
    )
    assert message["content"] == text


def test_a_users_name_that_is_long_is_not_read_as_json():
    long = json.dumps({"a": [[]] * MOST_VALUES, "session_id": "s"})

    assert user_of({}, long) == long and user_of({}, '{"a":1,"session_id":"s"}') == '{"a":1}'
