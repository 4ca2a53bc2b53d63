"""Chat messages as rows and rollout functions give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ASSISTANT = "assistant"  # role of what a policy writes
TRAIN = "train"  # key of a message that says whether it is trained, for any role
_EXPECTED = 'expected {"role": text, "content": text}'
_PLAIN_TYPES = {
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def plain_type(value: Any) -> str:
    """Return the JSON name of a value's type."""
    return _PLAIN_TYPES.get(type(value), type(value).__name__)


def has_answer(messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether a chat has trained messages: as a supervised row it needs no label."""
    return any(message.get("role") == ASSISTANT or message.get(TRAIN) for message in messages)


def message_problem(messages: Sequence[Any]) -> str:
    """Return the fault of the first bad message of a chat; empty if each has a role and a content.

    The assistant may call tools instead of writing a content. Templates write nothing for a key that is missing.
    """
    for number, message in enumerate(messages):
        problem = _problem(message)
        if problem:
            return f"message {number} of the prompt {problem}; {_EXPECTED}"
    return ""


def _problem(message: Any) -> str:
    if not isinstance(message, dict):
        return f"is {plain_type(message)}"
    for key in ("role", "content"):
        value = message.get(key)
        if key == "content" and value is None and message.get("tool_calls"):
            continue
        if key not in message:
            return f"has no {key!r} but {', '.join(map(repr, message)) or 'nothing'}"
        if not isinstance(value, str):
            return f"has {plain_type(value)} as {key!r}"
    if not isinstance(message.get(TRAIN), bool | None):
        return f"has {plain_type(message[TRAIN])} as {TRAIN!r}, which is true or false"
    return "" if message["role"] else "has an empty 'role'"
