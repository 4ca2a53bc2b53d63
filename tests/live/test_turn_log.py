"""Stored turns as a gateway knows them: a fold fed by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.live.apis.schema import LiveError, Request
from asyncrl.live.conversation import Conversations, Draft, history_key, tools_key
from asyncrl.live.difference import TurnBoundary
from asyncrl.live.session_turns import SessionTurns
from asyncrl.live.turn_log import Asked, TurnLog, asked
from harness.tokenizers import make_model
from topics.turns import TurnFinished, TurnSampled, TurnStarted

D1, D2, K1 = "1" * 32, "2" * 32, "a" * 32


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.fixture
def known(tmp_path: Path) -> Conversations:
    return Conversations(TurnBoundary(TaskTokenizer.load(make_model(tmp_path))), most_tokens=1000)


def key_of(known: Conversations, messages: list[dict[str, str]], text: str) -> str:
    return history_key({"role": "assistant", "content": text}, known.draft(messages, "anna")().key).hex()


@pytest.fixture
def turns(known: Conversations) -> TurnLog:
    return TurnLog(known, most_tokens=1000, retry_s=10.0)


def started(turn: str, *, digest: str = D1, **fields: object) -> TurnStarted:
    return TurnStarted(turn_id=turn, session="s", tenant="anna", api="chat", tokens=ids(3, 4), digest=digest, **fields)


def finished(turn, finish, tokens, history=""):
    return TurnFinished(turn_id=turn, session="s", finish=finish, tokens=tokens, history=history)


def sampled(turn: str, start: int, *tokens: int) -> TurnSampled:
    ones = np.full(len(tokens), -1.0, np.float32)
    return TurnSampled(turn_id=turn, start=start, tokens=ids(*tokens), logprobs=ones, versions=ids(*tokens))


def test_a_session_without_a_turn_that_feedback_applies_to_is_forgotten():
    sessions = SessionTurns()
    for name, secret in (("t1", "k1"), ("t2", "k2")):
        sessions.take(started(name, secret=secret))
    assert sessions.of("s") == ["t1", "t2"]

    sessions.take(finished("t1", "failed", ids()))
    assert sessions.of("s") == ["t2"]
    sessions.purge({"k2"})
    assert not sessions._turns and sessions._count == 0
    sessions.take(started("t3", secret="k3"))
    sessions.take(finished("t3", "gone", ids()))
    assert not sessions._turns and sessions._count == 0


def test_parts_of_a_reply_are_joined_up_to_the_first_that_is_missing(turns: TurnLog):
    for fact in (started("t1"), sampled("t1", 0, 5, 6), sampled("t1", 2, 7), sampled("t1", 4, 9)):
        turns.take(fact, "gateway-1", 1.0)

    (cut,) = turns.open_of("gateway-1")

    assert cut.tokens.tolist() == cut.versions.tolist() == [5, 6, 7]
    assert turns.open_of("gateway-2") == []


def test_a_cut_turn_is_gone_on_with_once_and_not_for_ever(turns: TurnLog):
    for turn in ("t1", "t2"):
        turns.take(started(turn), "gateway-1", 1.0)
        turns.take(TurnFinished(turn_id=turn, session="s", finish="gone", tokens=ids(5)), "gateway-1", 2.0)
    assert turns.retried(Asked(D2), 3.0) is None
    assert turns.retried(Asked(D1), 13.0) is None

    found = turns.retried(Asked(D1), 3.0)

    assert found is not None and found.started.turn_id == "t2" and not found.whole
    with turns.held([D1, ""]):  # one waits for its place; where it is refused, the next one may
        assert turns.retried(Asked(D1), 3.0) is None
    assert turns.retried(Asked(D1), 3.0) is found
    turns.take(started("t3", continues="t2"), "gateway-2", 3.0)
    assert turns.retried(Asked(D1), 3.0) is None


def test_a_cut_turn_whose_end_comes_behind_the_begin_of_the_next_one_is_gone_on_with_once(turns: TurnLog):
    turns.take(started("t1"), "gateway-1", 1.0)
    turns.take(started("t2", continues="t1"), "gateway-2", 2.0)  # which saw that the first gateway was gone
    assert [turn.started.turn_id for turn in turns.open_of("gateway-1")] == ["t1"]  # its next process ends it

    turns.take(finished("t1", "gone", ids(5)), "gateway-1", 3.0)

    assert turns.retried(Asked(D1), 3.0) is None
    turns.take(finished("t2", "gone", ids(5, 6)), "gateway-2", 4.0)
    found = turns.retried(Asked(D1), 4.0)
    assert found is not None and found.started.turn_id == "t2"


def test_an_idempotency_key_is_taken_before_the_begin_of_its_request_is_known(turns: TurnLog):
    with turns.held([K1]), pytest.raises(LiveError, match="is running"):
        turns.retried(Asked(D1, K1), 1.0)
    assert turns.retried(Asked(D1, K1), 1.0) is None


def test_a_whole_reply_is_given_again_only_to_a_client_that_asks_for_it_again(turns: TurnLog):
    turns.take(started("t1", key=K1), "gateway-1", 1.0)
    with pytest.raises(LiveError, match="is running"):
        turns.retried(Asked(D1, K1), 1.0)
    turns.take(TurnFinished(turn_id="t1", session="s", finish="stop", tokens=ids(5)), "gateway-1", 2.0)

    assert turns.retried(Asked(D1), 3.0) is None
    for request in (Asked(D1, again=True), Asked(D1, K1), Asked(D1, K1)):
        found = turns.retried(request, 3.0)
        assert found is not None and found.whole
    with pytest.raises(LiveError, match="another request"):
        turns.retried(Asked(D2, K1), 3.0)


@pytest.mark.parametrize("finish", ["stop", "gone"])
def test_a_reply_that_a_request_with_a_key_has_missed_waits_for_that_key(turns: TurnLog, finish: str):
    turns.take(started("t1", key=K1), "gateway-1", 1.0)
    turns.take(finished("t1", finish, ids(5)), "gateway-1", 2.0)
    turns.given(D1, "t1", missed=True)

    assert turns.retried(Asked(D1), 3.0) is None
    assert turns.retried(Asked(D1, K1), 3.0) is not None


def test_turns_that_no_retry_goes_on_with_are_forgotten(turns: TurnLog):
    for number in range(100):
        turns.take(started(f"t{number}", digest=f"{number:032}", key=f"{number:032}"), "gateway-1", 4.0 * number)
        turns.take(finished(f"t{number}", "gone", ids(5)), "gateway-1", 4.0 * number)

    assert len(turns._ended) == len(turns._by_key) == 3  # of 10 s
    assert turns.retried(Asked(*[f"{98:032}"] * 2), 400.0) is not None


def test_a_history_is_put_together_from_the_turns_that_it_has(turns: TurnLog, known: Conversations):
    first = [{"role": "user", "content": "a"}]
    second = [*first, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    third = [*second, {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}]
    turns.take(started("t1"), "gateway-1", 1.0)
    ended = finished("t1", "stop", ids(5, 2), key_of(known, first, "b"))
    turns.take(ended, "gateway-1", 1.0)
    turns.take(started("t2", parent="t1", known=4), "gateway-1", 1.0)
    ended = finished("t2", "length", ids(6), key_of(known, second, "d"))
    turns.take(ended, "gateway-1", 1.0)

    prompt = known.draft(third, "anna")()

    assert (prompt.parent, prompt.known, prompt.rewritten) == ("t2", 7, 0)
    assert prompt.ids[:7].tolist() == [3, 4, 5, 2, 3, 4, 6]
    turns.take(started("t3", parent="unknown", known=4), "gateway-1", 1.0)  # older than what was read
    ended = finished("t3", "stop", ids(6), key_of(known, third, "f"))
    turns.take(ended, "gateway-1", 1.0)
    fourth = [*third, {"role": "assistant", "content": "f"}, {"role": "user", "content": "g"}]
    assert known.draft(fourth, "anna")().parent == "t2"


def test_a_turn_is_followed_with_the_tools_that_it_declares_or_none(turns: TurnLog, known: Conversations):
    first, find = [{"role": "user", "content": "a"}], {"type": "function", "function": {"name": "find"}}
    for turn, tools in (("t1", tools_key([find])), ("t2", tools_key([])), ("t3", "")):  # t3: not told
        turns.take(started(turn, tools=tools), "gateway-1", 1.0)
        turns.take(finished(turn, "stop", ids(5, 2), key_of(known, first, turn)), "gateway-1", 1.0)

    def draft(turn: str, tools: list[Any], owner: str = "anna") -> Draft | None:
        return turns.draft(Request("policy", first, previous=turn, tools=tools), owner)

    found = [draft(turn, tools) for turn in ("t1", "t3") for tools in ([find], [])]
    assert all(one is not None and one().parent for one in found)
    for turn, tools in (("t1", [find, find]), ("t2", [find])):
        with pytest.raises(LiveError, match="tools are not those"):
            draft(turn, tools)
    assert draft("t1", [find, find], "ben") is None


def ask(
    owner: str, api: str, request: Request, headers: dict[str, str] | None = None, *, messages: bytes = b"a"
) -> Asked:
    (one,) = asked(owner, api, request, headers or {}, messages=messages)
    return one


def test_streaming_does_not_tell_requests_apart_and_all_else_does():
    request = Request("any", [{"role": "user", "content": "a"}])
    one = ask("anna", "chat", request)

    assert one == ask("anna", "chat", Request("any", request.messages, stream=True, usage=True))
    others = [ask("ben", "chat", request), ask("anna", "messages", request)]
    others.append(ask("anna", "chat", request, messages=b"b"))
    others.append(ask("anna", "chat", Request("any", request.messages, temperature=0.5)))
    session, kind = {"x-session-id": "side\udce9"}, {"x-turn-type": "side"}  # bytes of a header may be no text
    others += [ask("anna", "chat", request, headers) for headers in (session, kind, session | kind)]
    assert len({one.digest, *(other.digest for other in others)}) == 8
    assert ask("anna", "chat", request, {"x-stainless-retry-count": "1"}).again
    keys = {ask(tenant, "chat", request, {"Idempotency-Key": "k"}).key for tenant in ("anna", "ben")}
    assert len(keys) == 2 and "" not in keys
    wanted = Request("any", request.messages, choices=3)
    several = asked("anna", "chat", wanted, {"Idempotency-Key": "k"}, messages=b"a")
    assert len({one.digest for one in several}) == len({one.key for one in several}) == 3
