"""Bodies that take long to read are read in a time that grows with their size alone, or refused."""

import time
from typing import Any

import msgspec
import pytest

from asyncrl.live.apis.table import APIS

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
