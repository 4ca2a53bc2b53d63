"""Requests that agents make for themselves, recognised by their words."""

import pytest

from asyncrl.live.side_requests import is_side_request

QUESTION = {"role": "user", "content": "Why is the build red?"}
REPLY = {"role": "assistant", "content": "A test fails."}
CODE = {"role": "system", "content": "You are Claude Code, Anthropic's official CLI for Claude."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


SIDE = {
    "title of opencode": [system("You are a title generator. You output ONLY a thread title."), QUESTION],
    "compaction of Claude Code": [
        CODE,
        QUESTION,
        REPLY,
        user("Respond with text only.\n\nYour task is to create a detailed summary of the conversation so far, paying"),
    ],
    "partial compaction of Claude Code": [
        CODE,
        user("Your task is to create a detailed summary of the RECENT portion of the conversation"),
    ],
    "compaction of Codex": [QUESTION, REPLY, user("You are performing a CONTEXT CHECKPOINT COMPACTION. Create")],
    "compaction of opencode": [
        system("You are a helpful AI assistant tasked with summarizing conversations."),
        QUESTION,
    ],
    "heartbeat of OpenClaw": [
        user("Read HEARTBEAT.md if it exists (workspace context). If nothing needs attention, reply HEARTBEAT_OK.")
    ],
    "a tool that a heartbeat called": [
        user("If nothing needs attention, reply HEARTBEAT_OK."),
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "tool", "content": "empty", "tool_call_id": "c"},
    ],
    "memory of OpenClaw": [QUESTION, REPLY, user("Pre-compaction memory flush. Store durable memories only in")],
}


@pytest.mark.parametrize("kind", SIDE)
def test_what_an_agent_asks_for_itself_is_recognised(kind: str):
    assert is_side_request(SIDE[kind])


@pytest.mark.parametrize(
    "messages",
    [
        [CODE, QUESTION],
        [CODE, QUESTION, REPLY, user("Write a title generator"), REPLY, user("Summarize the conversation")],
        [*SIDE["heartbeat of OpenClaw"], {"role": "assistant", "content": "HEARTBEAT_OK"}, QUESTION],
        [],
    ],
)
def test_what_a_user_asks_is_not(messages: list[dict[str, str]]):
    assert not is_side_request(messages)
