from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer

from asyncrl.data.messages import message_problem
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.training.init_model import write_tokenizer
from harness.tokenizers import make_model
from topics.prompts import PromptRow

MARKED = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content | trim + eos_token }}{% endgeneration %}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
SYSTEM = {"role": "system", "content": "Be brief & <b>kind</b>, {{ really }}."}
USER = {"role": "user", "content": "What is 1+1, ça va? 😀"}
ANSWER = {"role": "assistant", "content": " It is 2 😀. "}
AGAIN = {"role": "user", "content": "Sure?\n"}
YES = {"role": "assistant", "content": "yes"}


def texts_of(tokenizer: TaskTokenizer, tokens: Any, mask: Any) -> str:
    """Return the text that the mask marks, special tokens included."""
    raw: Tokenizer = tokenizer._tokenizer
    return raw.decode([int(token) for token, marked in zip(tokens, mask, strict=True) if marked], False)


# Against transformers


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = make_model(tmp_path_factory.mktemp("model"))
    return TaskTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", ["^abc=", " What is\n\nthe answer? 😀ça", "<|im_start|>user<|im_end|>"])
def test_text_is_tokenised_as_transformers_does_it(both, text):
    ours, theirs = both
    tokens = ours.encode_prompt(PromptRow(text), max_tokens=None)

    assert tokens.dtype == np.int32
    assert tokens.tolist() == theirs(text)["input_ids"]
    assert ours.decode_all(tokens.tolist()) == theirs.decode(tokens.tolist())


@pytest.mark.parametrize("encode", ["encode_prompt", "encode_supervised"])
def test_a_bad_message_is_refused_with_the_error_of_the_row_reader(both, encode):
    row = PromptRow([SYSTEM, {"role": "user", "text": "abc"}, ANSWER], "x")

    with pytest.raises(TokenizerError, match=re.escape(message_problem(row.prompt))):
        getattr(both[0], encode)(row, max_tokens=None)


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [SYSTEM, USER],
        [SYSTEM, USER, ANSWER, AGAIN],
        [SYSTEM, {**USER, "name": None}, {"role": "assistant", "content": None, "tool_calls": [{}]}, AGAIN],
    ],
)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "ça", "x": "<&'"}}]])
def test_a_chat_is_tokenised_as_transformers_does_it(both, messages, tools):
    ours, theirs = both
    row = PromptRow(messages, metadata={"tools": tools} if tools else {})

    tokens = ours.encode_prompt(row, max_tokens=None)

    expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True)["input_ids"]
    assert tokens.tolist() == expected


def test_marked_assistant_text_is_masked_as_transformers_does_it(tmp_path):
    from transformers import AutoTokenizer

    make_model(tmp_path, template=MARKED)
    messages = [SYSTEM, USER, ANSWER, AGAIN, YES]

    ((tokens, mask),) = TaskTokenizer.load(tmp_path).encode_supervised(PromptRow(messages))

    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert tokens.tolist() == expected["input_ids"]
    assert mask.tolist() == expected["assistant_masks"]
    assert mask.dtype == np.uint8


@pytest.mark.parametrize("said", ["\ufdd0", "\ufdd1 a \ufdd0", "yes", "<|im_end|>"])
def test_spans_of_a_template_are_right_whatever_the_text_holds(tmp_path, said):
    from transformers import AutoTokenizer

    make_model(tmp_path, template=MARKED)
    messages = [{"role": "user", "content": f"say {said}"}, {"role": "assistant", "content": f"yes {said}"}]

    ((tokens, mask),) = TaskTokenizer.load(tmp_path).encode_supervised(PromptRow(messages))

    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert tokens.tolist() == expected["input_ids"]
    assert mask.tolist() == expected["assistant_masks"]


def test_text_that_a_macro_marks_is_found_by_what_it_adds_to_the_text_before(tmp_path):
    marked = "{% macro said(m) %}[{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endmacro %}"
    written = "{% for m in messages %}{{ said(m) if m.role == 'assistant' else m.content }}{% endfor %}"
    make_model(tmp_path, template=f"{marked}{written}{{{{ '[' if add_generation_prompt }}}}")
    tokenizer = TaskTokenizer.load(tmp_path)

    ((tokens, mask),) = tokenizer.encode_supervised(PromptRow([USER, YES]))

    assert texts_of(tokenizer, tokens, mask) == "yes<|im_end|>"


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_reasoning_has_the_names_that_transformers_gives_it(tmp_path, key, read):
    from transformers import AutoTokenizer

    written = f"{{{{ '<think>' + m.{read} if m.{read} is defined }}}}"
    make_model(tmp_path, template=f"{{% for m in messages %}}{written}{{{{ m.content }}}}{{% endfor %}}")
    messages = [USER, {**YES, key: "hm", "reasoning": "hm"}, AGAIN]

    tokens = TaskTokenizer.load(tmp_path).encode_prompt(PromptRow(messages), max_tokens=None)

    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, add_generation_prompt=True)
    assert tokens.tolist() == expected["input_ids"]
    assert "<think>hm" in TaskTokenizer.load(tmp_path).decode_all(tokens.tolist())


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace() %}{% set ns.__html__ = dict %}{{ ns | forceescape }}",
        "{{ namespace(_a=1) }}",
        "{{ dict.mro() }}",
    ],
)
def test_globals_of_a_template_are_as_guarded_as_those_of_transformers(tmp_path, template):
    from transformers import AutoTokenizer

    make_model(tmp_path, template=template)

    with pytest.raises(TokenizerError, match="the chat template of"):
        TaskTokenizer.load(tmp_path).encode_prompt(PromptRow([USER]), max_tokens=None)
    with pytest.raises(TemplateError):
        AutoTokenizer.from_pretrained(tmp_path).apply_chat_template([USER])


# Prompts


def test_text_gets_the_special_tokens_of_the_tokenizer_itself_and_chats_those_of_the_template(tmp_path):
    tokenizer = TaskTokenizer.load(make_model(tmp_path, bos=True))

    assert tokenizer.encode_prompt(PromptRow("a"), max_tokens=None).tolist()[0] == 0
    assert len(tokenizer.encode_prompt(PromptRow("a"), max_tokens=None)) == 2
    assert tokenizer.encode_prompt(PromptRow([USER]), max_tokens=None).tolist()[:2].count(0) == 1


def test_nothing_is_cut_even_where_the_tokenizer_file_asks_for_it(tmp_path):
    tokenizer = TaskTokenizer.load(make_model(tmp_path))

    assert tokenizer.decode(tokenizer.encode_prompt(PromptRow("xyz" * 50), max_tokens=None)) == "xyz" * 50


def test_the_template_may_stand_in_the_configuration(tmp_path):
    make_model(tmp_path, template=None)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"}]

    for template in ("{{ messages[0].content }}", templates):
        path.write_text(json.dumps(config | {"chat_template": template}))
        tokenizer = TaskTokenizer.load(tmp_path)
        assert tokenizer.decode(tokenizer.encode_prompt(PromptRow([AGAIN]), max_tokens=None)) == "Sure?\n"


def test_a_prompt_longer_than_the_context_is_refused(tmp_path):
    tokenizer = TaskTokenizer.load(make_model(tmp_path))

    assert len(tokenizer.encode_prompt(PromptRow("xyz"), max_tokens=3)) == 3
    with pytest.raises(TokenizerError, match="prompt 'xyz' has 3 tokens and at most 2 fit"):
        tokenizer.encode_prompt(PromptRow("xyz"), max_tokens=2)


def test_a_prompt_without_tokens_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="has no token"):
        TaskTokenizer.load(make_model(tmp_path)).encode_prompt(PromptRow(""), max_tokens=None)


def test_characters_that_the_vocabulary_lacks_are_named(tmp_path):
    write_tokenizer(tmp_path, "xyz", context=16)
    with pytest.raises(TokenizerError, match=r"cannot encode 'x7y!7.*': the vocabulary .* has no '7', '!'"):
        TaskTokenizer.load(tmp_path).encode_prompt(PromptRow("x7y!7"), max_tokens=None)


def test_a_chat_needs_a_chat_template(tmp_path):
    tokenizer = TaskTokenizer.load(make_model(tmp_path, template=None))

    assert len(tokenizer.encode_prompt(PromptRow("abc"), max_tokens=None)) == 3
    with pytest.raises(TokenizerError, match=r"is a chat and .* has no chat template"):
        tokenizer.encode_prompt(PromptRow([USER]), max_tokens=None)


def test_what_the_template_refuses_is_reported(tmp_path):
    tokenizer = TaskTokenizer.load(make_model(tmp_path))

    with pytest.raises(TokenizerError, match="fails: unknown role judge"):
        tokenizer.encode_prompt(PromptRow([{"role": "judge", "content": "x"}]), max_tokens=None)


def test_a_template_cannot_leave_its_sandbox(tmp_path):
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"

    with pytest.raises(TokenizerError, match="unsafe"):
        TaskTokenizer.load(make_model(tmp_path, template=template)).encode_prompt(PromptRow([USER]), max_tokens=None)


# Supervised rows


def test_an_answer_is_the_label_and_the_end_token(tmp_path):
    tokenizer = TaskTokenizer.load(make_model(tmp_path, bos=True))

    tokens = tokenizer.encode_answer(PromptRow("^a=", 42))

    assert tokens.dtype == np.int32
    assert texts_of(tokenizer, tokens, [1] * len(tokens)) == "42<|im_end|>"


def test_a_supervised_text_row_masks_its_answer(tmp_path):
    tokenizer = TaskTokenizer.load(make_model(tmp_path))

    ((tokens, mask),) = tokenizer.encode_supervised(PromptRow("^abc=", "cba"))

    assert mask.tolist() == [0] * 5 + [1] * 4
    assert tokenizer.decode(tokens) == "^abc=cba"
    assert mask.dtype == np.uint8


def test_a_chat_without_assistant_is_answered_by_its_label(tmp_path):
    tokenizer = TaskTokenizer.load(make_model(tmp_path))

    ((tokens, mask),) = tokenizer.encode_supervised(PromptRow([USER], "two"))

    prompt = tokenizer.encode_prompt(PromptRow([USER]), max_tokens=None)
    assert tokens[: len(prompt)].tolist() == prompt.tolist()
    assert texts_of(tokenizer, tokens, mask) == "two<|im_end|>"


def test_what_the_assistant_writes_is_masked_up_to_its_end_token(tmp_path):
    tokenizer = TaskTokenizer.load(make_model(tmp_path))

    ((tokens, mask),) = tokenizer.encode_supervised(PromptRow([SYSTEM, USER, ANSWER, AGAIN, YES]))

    assert texts_of(tokenizer, tokens, mask) == " It is 2 😀. <|im_end|>yes<|im_end|>"


def test_the_first_token_of_a_row_is_never_masked_as_trainable(tmp_path):
    template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    tokenizer = TaskTokenizer.load(make_model(tmp_path, template=template))

    ((tokens, mask),) = tokenizer.encode_supervised(PromptRow([YES, AGAIN, YES]))

    assert mask[0] == 0
    assert texts_of(tokenizer, tokens[1:], mask[1:]) == "es<|im_end|>yes<|im_end|>"


def test_a_template_that_rewrites_earlier_messages_needs_marks(tmp_path):
    template = "{% for m in messages %}[{{ m.content if loop.last else '...' }}]{% endfor %}"
    tokenizer = TaskTokenizer.load(make_model(tmp_path, template=template))

    with pytest.raises(TokenizerError, match=r"rewrites the text before message 1 differently .* \{% generation %\}"):
        tokenizer.encode_supervised(PromptRow([USER, ANSWER, AGAIN]))


def test_a_supervised_row_without_label_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="has no label"):
        TaskTokenizer.load(make_model(tmp_path)).encode_supervised(PromptRow("a"))


def test_a_supervised_row_longer_than_the_context_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="supervised row 'abc' has 6 tokens and at most 5 fit"):
        TaskTokenizer.load(make_model(tmp_path)).encode_supervised(PromptRow("abc", "xy"), max_tokens=5)


def test_a_model_without_end_token_has_no_supervised_answers(tmp_path):
    tokenizer = TaskTokenizer.load(make_model(tmp_path, eos=None))

    assert tokenizer.eos_ids == []
    with pytest.raises(TokenizerError, match="names no eos_token"):
        tokenizer.encode_answer(PromptRow("a", "b"))


# Loading


def test_all_end_tokens_are_known_and_the_tokenizers_own_comes_first(tmp_path):
    make_model(tmp_path, eos={"content": "<|end|>", "special": True})
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert TaskTokenizer.load(tmp_path).eos_ids == [2, 1]

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert TaskTokenizer.load(tmp_path).eos_ids == [2, 0]


@pytest.mark.parametrize(("skip", "text"), [(False, "<think>hm</think>Größe"), (True, "hmGröße")])
def test_text_has_the_special_tokens_but_for_ends_of_turns_unless_all_are_left_out(tmp_path, skip, text):
    special = ("<think>", "</think>", "<|im_end|>")
    tokenizer = TaskTokenizer.load(make_model(tmp_path, special=special), skip_special=skip)
    tokens = tokenizer.encode("<think>hm</think>Größe<|im_end|>")

    assert tokenizer.decode(tokens) == tokenizer.decode(tokens.tolist()) == text
    assert "".join(map(tokenizer.decoder(), tokens.tolist())) == text


def test_an_error_about_a_directory_without_tokenizer_lists_what_it_has(tmp_path):
    (tmp_path / "vocab.txt").touch()

    with pytest.raises(TokenizerError, match=r"has no tokenizer.json \(it has vocab.txt\)"):
        TaskTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "is no tokenizer"),
        ("tokenizer_config.json", "[", "tokenizer_config.json is not a JSON object"),
        ("chat_template.jinja", "{% if %}", "the chat template is broken"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    (make_model(tmp_path) / name).write_text(content)

    with pytest.raises(TokenizerError, match=message):
        TaskTokenizer.load(tmp_path)


def test_neither_torch_nor_transformers_is_loaded():
    code = (
        "import asyncrl.data.tokenizer, asyncrl.rewards.graders, sys; print({'torch', 'transformers'} & {*sys.modules})"
    )
    root = Path(__file__).parents[2]

    assert subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True) == "set()\n"


def test_while_a_long_text_is_encoded_other_threads_run(both):
    """A gateway encodes in a thread what a client sends; streams and vital signs of the same process must go on."""
    ours, theirs = both
    text = "What is 1+1, ça va? " * 20_000
    found: list[Any] = []
    encoding = threading.Thread(target=lambda: found.append(ours.encode(text)))
    turns = 0

    encoding.start()
    while encoding.is_alive():
        time.sleep(0)
        turns += 1

    assert turns > 50  # else it had the interpreter for itself
    assert found[0].tolist() == theirs.encode(text, add_special_tokens=False)
