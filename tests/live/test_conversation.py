"""Prompts of conversations begin with the ids that were sent and sampled; replies are never encoded again."""

import json
from pathlib import Path

import numpy as np
import pytest

from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.live.conversation import Conversations, Prompt, history_key
from asyncrl.live.difference import History, TurnBoundary
from asyncrl.live.turn_boundary import open_boundary
from harness.tokenizers import LLAMA3, LLAMA3_SPECIAL, QWEN3, TEMPLATE, make_model

SYSTEM = {"role": "system", "content": "brief"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def tokenizer(tmp_path: Path) -> TaskTokenizer:
    return TaskTokenizer.load(make_model(tmp_path))


@pytest.fixture
def known(tokenizer: TaskTokenizer) -> Conversations:
    return Conversations(TurnBoundary(tokenizer), most_tokens=10_000)


def sampled(tokenizer: TaskTokenizer, text: str, *, ends: bool = True) -> np.ndarray:
    """One id for each byte: no tokenizer would encode the text so."""
    ids = [int(tokenizer.encode(byte)[0]) for byte in text]
    return np.array(ids + ([tokenizer.eos_ids[0]] if ends else []), np.int32)


def turn(known: Conversations, name: str, messages: list[dict], text: str, ids: np.ndarray) -> Prompt:
    prompt = known.draft(messages)()
    known.put(history_key(reply(text), prompt.key), History(name, np.concatenate([prompt.ids, ids]), len(prompt.ids)))
    return prompt


CHATML = ("<|im_end|>", ("<|im_start|>", "<|im_end|>"))
TEMPLATES = [(TEMPLATE, *CHATML), (QWEN3, *CHATML), (LLAMA3, "<|eot_id|>", LLAMA3_SPECIAL)]


@pytest.mark.parametrize(("template", "end", "special"), TEMPLATES, ids=["qwen", "qwen3", "llama3"])
def test_a_continued_conversation_is_the_one_that_the_template_writes(
    tmp_path: Path, template: str, end: str, special: tuple[str, ...]
):
    tokenizer = TaskTokenizer.load(make_model(tmp_path, template=template, eos=end, special=special))
    known = Conversations(TurnBoundary(tokenizer), most_tokens=10_000)
    messages = [SYSTEM, user("What?")]
    turn(known, "t1", messages, "It is", np.append(tokenizer.encode("It is"), np.int32(tokenizer.eos_ids[0])))

    messages = [*messages, reply("It is"), user("And this?")]
    prompt = known.draft(messages)()

    assert prompt.parent == "t1"
    new = prompt.ids.tolist()[prompt.known :]
    assert new == TurnBoundary(tokenizer).whole(messages).tolist()[-len(new) :]  # as tokens, no text alone
    assert tokenizer.decode_all(prompt.ids.tolist()) == tokenizer.chat_text(messages)


def test_sampled_ids_are_taken_as_they_are(tokenizer: TaskTokenizer, known: Conversations):
    odd = sampled(tokenizer, "is the answer")
    first = turn(known, "t1", [user("What?")], "is the answer", odd)

    messages = [user("What?"), reply("is the answer"), user("question")]
    second = known.draft(messages)()

    history = [*first.ids.tolist(), *odd.tolist()]
    assert second.ids.tolist()[: len(history)] == history
    assert (second.parent, second.known, second.rewritten) == ("t1", len(history), 0)
    assert second.ids.tolist() != TurnBoundary(tokenizer).whole(messages).tolist()  # which encodes the reply otherwise
    assert tokenizer.decode_all(second.ids.tolist()) == tokenizer.chat_text(messages)


def test_a_reply_cut_short_is_closed(tokenizer: TaskTokenizer, known: Conversations):
    turn(known, "t1", [user("What?")], "is", sampled(tokenizer, "is", ends=False))

    messages = [user("What?"), reply("is"), user("question")]

    assert tokenizer.decode_all(known.draft(messages)().ids.tolist()) == tokenizer.chat_text(messages)


ROLES = ("[gMASK]", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
GLM = """[gMASK]
{%- for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}{{ '\n' + m.content }}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.mark.parametrize(
    ("end", "role", "behind"),
    [
        ("<|user|>", "user", "\na<|assistant|>"),
        ("<|observation|>", "tool", "\na<|assistant|>"),
        ("<|observation|>", "user", "<|user|>\na<|assistant|>"),
        ("<|user|>", "system", "<|system|>\na<|assistant|>"),
        ("<|endoftext|>", "user", "<|user|>\na<|assistant|>"),
        ("", "user", "<|user|>\na<|assistant|>"),
    ],
)
def test_a_role_that_the_model_opened_is_the_one_that_follows_or_another_is_opened(
    tmp_path: Path, end: str, role: str, behind: str
):
    make_model(tmp_path, template=GLM, eos="<|endoftext|>", special=ROLES)
    ends = [ROLES.index(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer = TaskTokenizer.load(tmp_path)
    ids = tokenizer.encode("[gMASK]<|user|>\nWhat?<|assistant|>is" + end)

    found = TurnBoundary(tokenizer).after(History("t", ids, 9), [{"role": role, "content": "a"}])

    assert tokenizer.decode_all(found.tolist()) == tokenizer.decode_all(ids.tolist()) + behind


def test_the_longest_known_history_counts(tokenizer: TaskTokenizer, known: Conversations):
    messages = [user("What?")]
    for number in range(1, 5):
        turn(known, f"t{number}", messages, f"is {number}", sampled(tokenizer, f"is {number}"))
        messages = [*messages, reply(f"is {number}"), user("this")]

    assert known.draft(messages)().parent == "t4"
    edited = [*messages[:-2], reply("edited"), user("this")]
    assert known.draft(edited)()[1:4:2] == ("t3", 1)  # one reply that no turn gave
    assert known.draft([user("Other?"), *messages[1:]])()[1:5] == ("", 0, 4, "")


def test_retries_and_branches_share_the_history(tokenizer: TaskTokenizer, known: Conversations):
    turn(known, "t1", [user("What?")], "is", sampled(tokenizer, "is"))
    before = [user("What?"), reply("is")]
    turn(known, "t2", [*before, user("this")], "answer", sampled(tokenizer, "answer"))

    assert [known.draft([*before, user(text)])().parent for text in ("this", "that")] == ["t1", "t1"]


def test_with_other_tools_a_conversation_is_written_anew_and_its_replies_counted(
    tokenizer: TaskTokenizer, known: Conversations
):
    turn(known, "t1", [user("What?")], "is", sampled(tokenizer, "is"))
    messages = [user("What?"), reply("is"), user("this")]
    find = {"type": "function", "function": {"name": "find", "description": "", "parameters": {"type": "object"}}}

    assert [known.draft(messages, tools=tools)()[1:4:2] for tools in ([], [find])] == [("t1", 0), ("", 1)]


def answered(known: Conversations, name: str, messages: list[dict], text: str, ids: np.ndarray, session: str) -> None:
    """Have a turn of a session answer messages."""
    prompt = known.draft(messages)()
    whole = np.concatenate([prompt.ids, ids])
    known.put(history_key(reply(text), prompt.key), History(name, whole, len(prompt.ids), session, before=prompt.key))


def test_a_rewritten_reply_stays_in_the_session_of_the_turn_that_answered_the_messages_before_it(
    tokenizer: TaskTokenizer, known: Conversations
):
    answered(known, "t1", [user("What?")], "is", sampled(tokenizer, "is"), "s1")
    rewritten = [user("What?"), reply("Thought: is"), user("this")]
    answered(known, "t2", rewritten, "answer", sampled(tokenizer, "answer"), "s1")

    prompt = known.draft([*rewritten, reply("Final answer"), user("this")])()

    assert (prompt.session, prompt.parent, prompt.rewritten) == ("s1", "", 2)
    assert known.draft([user("Other?"), reply("is"), user("this")])().session == ""


def test_of_several_sessions_with_the_same_messages_the_text_of_the_reply_decides(
    tokenizer: TaskTokenizer, known: Conversations
):
    for name, text in (("t1", "is the answer"), ("t2", "question")):
        answered(known, name, [user("What?")], text, sampled(tokenizer, text), f"s{name}")

    sessions = [
        known.draft([user("What?"), reply(text), user("this")])().session
        for text in ("Thought: is the answer", "question: what", "summary")
    ]

    assert sessions == ["st1", "st2", ""]
    known.forget({"t2"})
    assert known.draft([user("What?"), reply("summary"), user("this")])().session == "st1"


def test_a_variable_of_the_template_changes_what_follows_and_no_history(tokenizer: TaskTokenizer, known: Conversations):
    first = turn(known, "t1", [user("What?")], "is", sampled(tokenizer, "is"))
    messages = [user("What?"), reply("is"), user("this")]

    plain, switched = (known.draft(messages, variables=one)() for one in ({}, {"enable_thinking": False}))

    assert (plain.parent, switched.parent, switched.rewritten) == ("t1", "t1", 0)
    assert switched.ids.tolist()[: len(first.ids)] == first.ids.tolist()
    written = tokenizer.decode_all(switched.ids.tolist())
    assert written == tokenizer.decode_all(plain.ids.tolist()) + "<think></think>"


def test_a_variable_that_the_template_writes_before_a_reply_begins_another_conversation(tmp_path: Path):
    template = "{{ style | default('') }}" + TEMPLATE
    tokenizer = TaskTokenizer.load(make_model(tmp_path, template=template))
    known = Conversations(TurnBoundary(tokenizer), most_tokens=10_000)
    turn(known, "t1", [user("What?")], "is", sampled(tokenizer, "is"))
    messages = [user("What?"), reply("is"), user("this")]

    prompts = [known.draft(messages, variables=one)() for one in ({"style": "<|im_end|>"}, {"other": 1})]

    assert [(one.parent, one.rewritten) for one in prompts] == [("", 1), ("t1", 0)]
    assert tokenizer.eos_ids[0] != prompts[0].ids[0]  # what a client says stays text


def test_what_is_forgotten_is_written_anew(tokenizer: TaskTokenizer):
    known = Conversations(TurnBoundary(tokenizer), most_tokens=60)
    for number in range(5):
        turn(known, f"t{number}", [user(f"What {number}?")], "is", sampled(tokenizer, "is"))

    first = known.draft([user("What 0?"), reply("is"), user("this")])()
    last = known.draft([user("What 4?"), reply("is"), user("this")])()

    assert (first.parent, first.rewritten) == ("", 1)
    assert (last.parent, last.rewritten) == ("t4", 0)


UNSAFE = {
    "no end of sequence": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    "what precedes it": "{% for m in messages %}{{ m.content }}{{ eos_token }}{{ messages | length }}{% endfor %}",
    "0 times": "{% for m in messages if m.role == 'user' %}{{ m.content }}{{ eos_token }}{% endfor %}",
    "2 times": "{% for m in messages %}{{ m.content }}{{ m.content }}{{ eos_token }}{% endfor %}",
}
WORDS = {"no end of sequence": "end-of-sequence token first", "what precedes it": "differently when more precedes"}


@pytest.mark.parametrize("fault", UNSAFE)
def test_an_unsafe_seam_is_found_at_the_start(tmp_path: Path, fault: str):
    tokenizer = TaskTokenizer.load(make_model(tmp_path, template=UNSAFE[fault]))

    with pytest.raises(TokenizerError, match=WORDS.get(fault, fault)):
        TurnBoundary(tokenizer)


def test_a_model_without_a_template_serves_no_conversation(tmp_path: Path):
    with pytest.raises(TokenizerError, match=r"a gateway serves chats, and .* has no chat template; put chat_template"):
        open_boundary(TaskTokenizer.load(make_model(tmp_path, template=None)), "auto")


def test_a_message_that_holds_the_mark_is_refused(known: Conversations, tokenizer: TaskTokenizer):
    turn(known, "t1", [user("What?")], "is", sampled(tokenizer, "is"))

    with pytest.raises(TokenizerError, match="2 times, expected once"):
        known.draft([user("What?"), reply("is"), user("\ufdd2")])()


def test_a_conversation_that_came_before_has_the_keys_that_it_has_anew(tokenizer: TaskTokenizer, known: Conversations):
    messages: list[dict] = []
    for number in range(5):
        messages = [*messages, user(f"What? {number}")]
        prompt = turn(known, f"t{number}", messages, "is", sampled(tokenizer, "is"))
        anew = Conversations(TurnBoundary(tokenizer), most_tokens=10_000).draft(messages)()
        assert prompt.key == anew.key and prompt.parent == (f"t{number - 1}" if number else "")
        messages = [*messages, reply("is")]
    messages = [*messages, user("And?")]

    known.forget({"t4", "t3"})

    assert (known.draft(messages)().parent, known.draft(messages)().rewritten) == ("t2", 2)
    assert known.draft(messages, "another")().parent == ""
    thought = [
        one | {"reasoning_content": "hm", "turn": "t0"} if one["role"] == "assistant" else one for one in messages
    ]
    assert known.draft(thought)().key == known.draft(messages)().key
