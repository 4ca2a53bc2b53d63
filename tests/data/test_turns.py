"""The trained tokens of conversations, under templates in the shape of Qwen3's and of Llama 3's, counted by hand."""

import numpy as np
import pytest

from asyncrl.data.messages import message_problem
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.data.turns import Turns
from harness.tokenizers import LLAMA3, LLAMA3_SPECIAL, QWEN3, make_model
from topics.prompts import PromptRow

MARKED_QWEN3 = QWEN3.replace(
    "{{- '<|im_start|>assistant\\n' }}\n        {%- set", "{{- '<|im_start|>assistant\\n' }}{%- generation %}{%- set"
).replace("{{- '<|im_end|>\\n' }}\n    {%- elif", "{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}\n    {%- elif")


def user(content, **further):
    return {"role": "user", "content": content, **further}


def answer(content, reasoning=None, **further):
    return {"role": "assistant", "content": content, **further} | (
        {"reasoning_content": reasoning} if reasoning else {}
    )


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in ("qwen3", "marked", "llama3")]
    return {
        "qwen3": TaskTokenizer.load(make_model(folders[0], template=QWEN3)),
        "marked": TaskTokenizer.load(make_model(folders[1], template=MARKED_QWEN3)),
        "llama3": TaskTokenizer.load(make_model(folders[2], template=LLAMA3, eos="<|eot_id|>", special=LLAMA3_SPECIAL)),
    }


def shown(tokenizer, row, turns=None):
    """Each text of a row, its trained tokens between « and »."""
    found = []
    for tokens, mask in tokenizer.encode_supervised(row, *([turns] if turns else [])):
        assert (tokens.dtype, mask.dtype) == (np.int32, np.uint8)
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
        parts = np.split(tokens, edges)
        texts = [tokenizer.decode_all(part.tolist()) for part in parts]
        marks = ["«", "»"] * (len(edges) // 2)
        found.append("".join(text + mark for text, mark in zip(texts, [*marks, ""], strict=True)))
    return found


TWO = [user("a"), answer("b"), user("c"), answer("d")]


def test_llama3_writes_one_text_in_which_each_answer_is_trained_with_its_end(tokenizers):
    head, end = "<|start_header_id|>", "<|end_header_id|>\n\n"
    rows = tokenizers["llama3"].encode_supervised(PromptRow(TWO))

    ((tokens, mask),) = rows
    # <|begin_of_text|>, then user: header, u s er, header, two line ends, a, <|eot_id|>: 9 tokens to the assistant's
    # header, which has 12 (a s s is t an t), then b and <|eot_id|>; and the same again.
    assert mask.tolist() == [0] * 21 + [1, 1] + [0] * 20 + [1, 1]
    assert len(tokens) == 45
    assert shown(tokenizers["llama3"], PromptRow(TWO)) == [
        f"<|begin_of_text|>{head}user{end}a<|eot_id|>{head}assistant{end}«b<|eot_id|>»"
        f"{head}user{end}c<|eot_id|>{head}assistant{end}«d<|eot_id|>»"
    ]


@pytest.mark.parametrize("name", ["qwen3", "marked"])
def test_qwen3_writes_a_text_for_each_answer_as_it_was_prompted_for(tokenizers, name):
    row = PromptRow([user("a"), answer("b", "r"), user("c"), answer("d", "s")])

    ask, reply = "<|im_start|>user\n", "<|im_start|>assistant\n"
    assert shown(tokenizers[name], row) == [
        f"{ask}a<|im_end|>\n{reply}«<think>\nr\n</think>\n\nb<|im_end|>»\n",
        f"{ask}a<|im_end|>\n{reply}b<|im_end|>\n{ask}c<|im_end|>\n{reply}«<think>\ns\n</think>\n\nd<|im_end|>»\n",
    ]
    first = tokenizers[name].encode_supervised(row)[0][1]
    # user: <|im_start|> u s er Ċ a <|im_end|> Ċ is 8, the assistant's header <|im_start|> a s s is t an t Ċ 9;
    # < t h i n k > Ċ r Ċ < / t h i n k > Ċ Ċ b <|im_end|> is 22, and a line end follows
    assert first.tolist() == [0] * 17 + [1] * 22 + [0]


@pytest.mark.parametrize("name", ["qwen3", "marked"])
def test_answers_behind_one_question_stand_in_one_text_with_their_tools(tokenizers, name):
    call = {"name": "add", "arguments": {"x": 1}}
    messages = [user("a"), answer(None, "r", tool_calls=[call]), {"role": "tool", "content": "2"}, answer("b", "s")]
    row = PromptRow(messages, metadata={"tools": [{"name": "add"}]})

    (text,) = shown(tokenizers[name], row)

    system, written, rest = text.partition("<|im_end|>\n")
    assert written and '\n{"name": "add"}\n' in system
    assert rest == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        '«<think>\nr\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "«<think>\ns\n</think>\n\nb<|im_end|>»\n"
    )


@pytest.mark.parametrize(
    ("messages", "turns", "trained"),
    [
        (TWO, Turns(last=True), ["d"]),
        ([*TWO[:3], answer("d", train=False)], Turns(), ["b"]),
        ([*TWO[:3], answer("d", train=False)], Turns(last=True), ["b"]),
        ([user("a"), answer("b", train=False), user("c"), answer("d", train=True)], Turns(), ["d"]),
        ([user("a", train=True), answer("b", train=None)], Turns(last=True), ["b"]),
    ],
)
def test_roles_flags_and_the_last_turn_choose_what_is_trained(tokenizers, messages, turns, trained):
    (text,) = shown(tokenizers["llama3"], PromptRow(messages), turns)

    assert [part.split("»")[0].removesuffix("<|eot_id|>") for part in text.split("«")[1:]] == trained


def test_a_message_of_another_role_is_trained_with_its_header(tokenizers):
    (text,) = shown(tokenizers["llama3"], PromptRow(TWO), Turns(roles=("user",)))

    head, end = "<|start_header_id|>", "<|end_header_id|>\n\n"
    assert text == (
        f"<|begin_of_text|>«{head}user{end}a<|eot_id|>»{head}assistant{end}b<|eot_id|>«{head}user{end}c<|eot_id|>»"
    )


def test_what_is_behind_the_last_trained_message_is_left_out(tokenizers):
    assert shown(tokenizers["llama3"], PromptRow([*TWO, user("e")])) == shown(tokenizers["llama3"], PromptRow(TWO))


def test_a_token_over_the_edge_is_cut_there_as_in_a_prompt(tmp_path):
    template = "{% for m in messages %}{{ ' t' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %} t{% endif %}"
    tokenizer = TaskTokenizer.load(make_model(tmp_path, template=template))
    assert len(tokenizer.encode(" the")) == 1  # as one text it would be one token

    (text,) = shown(tokenizer, PromptRow([user("is"), answer("he<|im_end|>")]))
    ((tokens, _),) = tokenizer.encode_supervised(PromptRow([user("is"), answer("he<|im_end|>")]))

    assert text == "is t«he<|im_end|>»"
    prompt = tokenizer.encode_prompt(PromptRow([user("is")]), max_tokens=None)
    assert tokens[: len(prompt)].tolist() == prompt.tolist()


def test_reasoning_that_the_template_leaves_out_is_refused(tokenizers):
    with pytest.raises(TokenizerError, match="does not write 'reasoning_content' of message 1; remove it"):
        tokenizers["llama3"].encode_supervised(PromptRow([user("a"), answer("b", "r")]))
    with pytest.raises(TokenizerError, match="does not write 'thinking' of message 1"):
        tokenizers["llama3"].encode_supervised(PromptRow([user("a"), answer("b", thinking="deep")]))


def test_a_conversation_of_which_nothing_is_trained_is_refused(tokenizers):
    row = PromptRow([user("a"), answer("b", train=False)])

    with pytest.raises(
        TokenizerError, match=r"no message is trained: there are user, assistant, of which assistant are"
    ):
        tokenizers["qwen3"].encode_supervised(row)


def test_a_flag_that_is_neither_true_nor_false_is_refused():
    assert message_problem([user("a"), answer("b", train="no")]).startswith(
        "message 1 of the prompt has text as 'train', which is true or false"
    )
