"""Fields of a row: its prompt, label, metadata and tools, under the keys that options name."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from asyncrl.data.messages import has_answer, message_problem, plain_type
from asyncrl.environments.protocol import DataError
from topics.prompts import PromptRow

WARMUP = "the warm-up"
"""A reader of labels, which takes the answers of conversations in place of a label."""
MESSAGES = "messages"
"""Usual key of a conversation: a row without a prompt may have the key."""

_USUAL = {  # names that data sets give a field, the likeliest first
    "prompt": ("question", "problem", "query", "instruction", "input", "conversations", "text"),
    "label": ("ground_truth", "answer", "solution", "target", "expected_answer", "final_answer", "response", "output"),
}
_WRITTEN_CHAT = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""")


class Keys(msgspec.Struct):
    """The keys of a row's fields, with dots for those of an object in the row: `reward_model.ground_truth`."""

    prompt_key: str = "prompt"
    label_key: str = "label"
    metadata_key: str = "metadata"
    tools_key: str = "tools"
    convert: str = ""  # user's function of a row


def encode_row(value: Any, keys: Keys, labels_for: str, columns: Sequence[str] = ()) -> bytes:
    """Return a row as MessagePack of a `PromptRow`.

    Args:
        labels_for: the reader of labels; "" if there is none.
        columns: names of all fields of the data, if the row has only some of them.

    Raises:
        DataError: the row cannot serve, with its fields and the keys that may be meant.
    """
    if not isinstance(value, dict):
        raise DataError(f"expected an object with the key {keys.prompt_key!r}, found {plain_type(value)}")
    key = MESSAGES if not _has(value, keys.prompt_key) and MESSAGES in value else keys.prompt_key
    if not _has(value, key):
        raise DataError(f"no prompt under {key!r}{_found('prompt', value, columns)}")
    prompt, label = _prompt(_at(value, key), key), _at(value, keys.label_key)
    if isinstance(label, float) and math.isnan(label):
        label = None  # so tables hold a value that is missing
    if label is None and labels_for and not (labels_for == WARMUP and isinstance(prompt, list) and has_answer(prompt)):
        words = f"{labels_for} needs a label and there is none under {keys.label_key!r}"
        raise DataError(f"{words}{_found('label', value, columns)}")
    metadata = _object(_at(value, keys.metadata_key), keys.metadata_key)
    if (tools := _at(value, keys.tools_key)) is not None:
        metadata["tools"] = _tools(tools, keys.tools_key)
    try:
        return msgspec.msgpack.encode(PromptRow(prompt, label, metadata))
    except OverflowError as error:
        where = keys.metadata_key if _fits(label) else keys.label_key
        raise DataError(f"{where!r} has an integer of more than 64 bits; write it as text") from error


def field_names(value: dict[str, Any]) -> list[str]:
    """Return the keys of an object, and those of the objects in it with dots."""
    inner = [(name, one) for name, one in value.items() if isinstance(one, dict)]
    return [*value, *(f"{name}.{key}" for name, one in inner for key in field_names(one))]


def _has(value: dict[str, Any], key: str) -> bool:
    """Return whether a row has a field, which may be null."""
    outer, _, name = key.rpartition(".")
    return key in value or (bool(outer) and isinstance(inner := _at(value, outer), dict) and name in inner)


def _at(value: dict[str, Any], key: str) -> Any:
    """Return a field of a row; None if it is absent."""
    if key in value or "." not in key:
        return value.get(key)
    outer, _, name = key.rpartition(".")
    inner = _at(value, outer)
    return inner.get(name) if isinstance(inner, dict) else None


def _found(kind: str, value: dict[str, Any], columns: Sequence[str]) -> str:
    """Return words with the fields of a row, and the one that may be meant."""
    names, usual = columns or field_names(value), _USUAL[kind]
    found = ", ".join(repr(name) for name in names if name in value or "." not in name) or "no key"
    meant = [(usual.index(last), name.count("."), name) for name in names if (last := name.split(".")[-1]) in usual]
    return f"; found {found}" + (f'; the option {kind}_key = "{min(meant)[2]}" would read that one' if meant else "")


def _prompt(prompt: Any, key: str) -> str | list[dict[str, Any]]:
    if isinstance(prompt, str):
        prompt = _chat_of(prompt, key)
    if not isinstance(prompt, str | list) or not prompt:
        empty = "empty" if prompt in ("", []) else plain_type(prompt)
        raise DataError(f"the prompt under {key!r} is {empty}; expected text or a list of chat messages")
    problem = message_problem(prompt) if isinstance(prompt, list) else ""
    if problem:
        raise DataError(problem)
    return prompt


def _chat_of(text: str, key: str) -> Any:
    """Return the messages that a text is the JSON of, or else the text."""
    if not text.lstrip().startswith("[") and key != MESSAGES:
        return text
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        found = None
    if isinstance(found, list) and found and all(isinstance(one, dict) and "role" in one for one in found):
        return found
    if key == MESSAGES or _WRITTEN_CHAT.match(text):
        raise DataError(f"the text under {key!r} is no JSON of chat messages: {text[:60]!r}; write it by json.dumps")
    return text


def _object(value: Any, key: str) -> dict[str, Any]:
    """Metadata: an object, or its JSON."""
    found = value
    if isinstance(value, str):
        try:
            found = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found = None
    if not isinstance(found, dict | None) or (found is None and value is not None):
        raise DataError(f"{key!r} is {plain_type(value)}; expected an object, or the JSON of one")
    return dict(found or {})


def _tools(value: Any, key: str) -> list[dict[str, Any]]:
    """Tools that a chat template describes: a list of objects, or its JSON."""
    try:
        return msgspec.convert(msgspec.json.decode(value) if isinstance(value, str) else value, list[dict[str, Any]])
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise DataError(f"the tools under {key!r} are no list of objects, nor the JSON of one: {error}") from error


def _fits(value: Any) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return False
    return True
