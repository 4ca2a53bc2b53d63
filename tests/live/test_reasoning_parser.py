"""Reasoning in replies: told from text while it comes, whichever side opens it."""

from pathlib import Path

import pytest

from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.live.apis.openai import UNTHOUGHT
from asyncrl.live.apis.schema import LiveError, Request, Thought
from asyncrl.live.forced_prefix import begin_reply
from asyncrl.live.reasoning_parser import ThoughtText, opened_by, thought_tokens
from asyncrl.live.reply_parser import ReplyParts
from asyncrl.live.tools import Wording
from harness.live_runs import WITH_TOOLS
from harness.tokenizers import LLAMA3, QWEN3, make_model

OPENING = QWEN3.replace("<|im_start|>assistant\n' }}{%- endif %}", "<|im_start|>assistant\n<think>\n' }}{%- endif %}")
CASES = [
    (False, "<think>\na <b\n</think>\n\nYes", "a <b", "Yes"),
    (True, "a\n</think>\n\nYes\n", "a", "Yes\n"),
    (False, " <thin", "", " <thin"),
    (False, "Yes <think>", "", "Yes <think>"),
    (False, "<think>cut </thi", "cut </thi", ""),
    (True, "</think>Yes", "", "Yes"),
    (None, "<think>a</think>Yes", "", "<think>a</think>Yes"),
]


@pytest.mark.parametrize(("opened", "reply", "thoughts", "said"), CASES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_is_told_from_text_however_it_comes(
    opened: bool | None, reply: str, thoughts: str, said: str, size: int
):
    text = ThoughtText(opened=opened)
    found = [piece for start in range(0, len(reply), size) for piece in text.add(reply[start : start + size])]
    found += text.end()

    told = [piece.text for piece in found if isinstance(piece, Thought)]
    assert "".join(told) == text.thoughts == thoughts
    assert "".join(piece for piece in found if isinstance(piece, str)) == said


def test_marks_of_reasoning_may_be_special_tokens(tmp_path: Path):
    special = ("<|im_start|>", "<think>", "</think>", "<|im_end|>")
    tokenizer = TaskTokenizer.load(make_model(tmp_path, template=QWEN3, special=special))
    ids = tokenizer.encode("<think>\nhm</think>\n\nYes<|im_end|>")
    text, step = ThoughtText(opened=opened_by(tokenizer)), tokenizer.decoder()

    found = [piece for token in ids.tolist() for piece in text.add(step(token))] + text.end()

    assert (text.thoughts, "".join(piece for piece in found if isinstance(piece, str))) == ("hm", "Yes")
    assert thought_tokens(tokenizer, ids) == len(tokenizer.encode("<think>\nhm</think>"))


@pytest.mark.parametrize(("template", "opened"), [(QWEN3, False), (OPENING, True), (LLAMA3, None)])
def test_the_template_tells_who_opens_it(tmp_path: Path, template: str, opened: bool | None):
    assert opened_by(TaskTokenizer.load(make_model(tmp_path, template=template))) is opened


TOOLS = [{"type": "function", "function": {"name": 'fi"nd', "description": "", "parameters": {}}}]
CALL = "message.tool_calls[0].function"
BEHIND = WITH_TOOLS.replace(
    "{'name': c.function.name, 'arguments': c.function.arguments}",
    "{'arguments': c.function.arguments, 'name': c.function.name}",
)


def test_a_forced_call_closes_reasoning_that_the_template_opens(tmp_path: Path):
    wording = Wording.of(TaskTokenizer.load(make_model(tmp_path, template=OPENING)))

    begun = begin_reply(Request("any", [], tools=TOOLS, forced='fi"nd'), wording, grammars=False)

    assert begun.text == '<tool_call>\n{"name": "fi\\"nd", "arguments":'
    assert wording.tokenizer.decode_all(begun.ids.tolist()) == f"\n</think>\n\n{begun.text}"


SWITCH = "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
SWITCHED = QWEN3.replace("assistant\n' }}{%- endif %}", "assistant\n' }}" + SWITCH + "{%- endif %}")


@pytest.mark.parametrize(
    ("template", "begins"),
    [(SWITCHED, ""), (OPENING, "\n</think>\n\n"), (QWEN3, "<think>\n\n</think>\n\n"), (LLAMA3, "")],
    ids=["a switch", "opened", "no switch", "no reasoning"],
)
def test_a_reply_without_reasoning_begins_closed_under_each_kind_of_template(
    tmp_path: Path, template: str, begins: str
):
    wording = Wording.of(TaskTokenizer.load(make_model(tmp_path, template=template)))
    request = Request("any", [], reasons=False, variables=UNTHOUGHT)

    begun = begin_reply(request, wording, grammars=False)

    assert wording.tokenizer.decode_all(begun.ids.tolist()) == begins
    parts = ReplyParts(request, wording, "t")
    assert "".join(map(str, [*parts.add(wording.tokenizer.encode("Yes")), *parts.end()])) == "Yes"


def test_what_template_or_engine_cannot_do_is_refused(tmp_path: Path):
    wording = Wording.of(TaskTokenizer.load(make_model(tmp_path, template=BEHIND)))

    with pytest.raises(LiveError, match="names the tool after its arguments"):
        begin_reply(Request("any", [], tools=TOOLS, forced=""), wording, grammars=True)
    with pytest.raises(LiveError, match="which the embedded engine of this run cannot force"):
        begin_reply(Request("any", [], schema="{}"), wording, grammars=False)
    with pytest.raises(LiveError, match="not supported by the embedded engine") as refused:
        begin_reply(Request("any", [], presence_penalty=0.1), wording, grammars=False)
    assert refused.value.field == "presence_penalty"
    with pytest.raises(LiveError, match="logit_bias is not supported by the embedded engine"):
        begin_reply(Request("any", [], logit_bias={"1": 1.0}), wording, grammars=False)
