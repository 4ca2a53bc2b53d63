"""Calls of tools in replies: told from text while it comes, by how the chat template writes them."""

from pathlib import Path

import pytest

from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.live.apis.schema import Call
from asyncrl.live.tools import FORMATS, CallText, format_of
from harness.tokenizers import LLAMA3, QWEN3, TEMPLATE, make_model

CALL = '<tool_call>\n{"name": "find", "arguments": {"a": [1, "<b"]}}\n</tool_call>'
FIND = Call("call_t1_0", "find", {"a": [1, "<b"]})
LLAMA3_TOOLS = LLAMA3.replace(
    "message.content | trim",
    '((\'{"name": "\' + message.tool_calls[0].function.name + \'", "parameters": \' '
    "+ (message.tool_calls[0].function.arguments | tojson) + '}') if message.tool_calls else message.content)",
)


@pytest.mark.parametrize(
    ("template", "family"), [(QWEN3, "hermes"), (LLAMA3_TOOLS, "llama3"), (LLAMA3, None), (TEMPLATE, None)]
)
def test_the_template_tells_how_calls_are_written(tmp_path: Path, template: str, family: str | None):
    tokenizer = TaskTokenizer.load(make_model(tmp_path, template=template))

    assert format_of(tokenizer) == (None if family is None else FORMATS[family])


CASES = [
    ("hermes", "Just text < and <tool", ["Just text < and <tool"]),
    ("hermes", CALL, [FIND]),
    ("hermes", f"Let me see.\n\n{CALL}\n", ["Let me see.", FIND]),
    ("hermes", f"{CALL}\n{CALL}", [FIND, Call("call_t1_1", "find", {"a": [1, "<b"]})]),
    ("hermes", f"{CALL} And?", [FIND, " And?"]),
    ("hermes", "<tool_call>no JSON</tool_call>", ["<tool_call>no JSON</tool_call>"]),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', ['<tool_call>{"name": 5}</tool_call>']),
    ("hermes", '<tool_call>{"name": "cut', ['<tool_call>{"name": "cut']),
    ("llama3", '{"name": "find", "parameters": {"a": [1, "<b"]}}', [FIND]),
    ("llama3", 'Say {"name": 1}', ['Say {"name": 1}']),
    ("llama3", '{"name": "cut", ', ['{"name": "cut", ']),
]


@pytest.mark.parametrize(("family", "reply", "pieces"), CASES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_told_from_text_however_it_comes(family: str, reply: str, pieces: list[str | Call], size: int):
    text = CallText(FORMATS[family], "t1")
    found = [piece for start in range(0, len(reply), size) for piece in text.add(reply[start : start + size])]
    found += text.end()

    joined: list[str | Call] = []
    for piece in found:
        if joined and isinstance(piece, str) and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    assert joined == pieces
    assert text.calls == [piece for piece in pieces if isinstance(piece, Call)]
    assert text.text == "".join(piece for piece in pieces if isinstance(piece, str))


def test_without_tools_all_is_text_at_once():
    text = CallText(None, "t1")

    assert [*text.add(CALL + " \n"), *text.end()] == [CALL + " \n"]
