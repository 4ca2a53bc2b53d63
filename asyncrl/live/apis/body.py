"""Bodies of requests: typed fields, and one refusal for each that is wrong or unknown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from asyncrl.live.apis.schema import LiveError

MOST_VALUES = 2**17  # of a body: reading more of them takes so long that streams would be silent
MOST_MESSAGES, MOST_STOPS, MOST_STOP_CHARS = 4096, 16, 512
MOST_SCHEMA_CHARS = 2**17  # an engine makes a grammar of it, and each request keeps it
_SHOWN = 80  # characters of a wrong value that a refusal repeats
_Value = TypeVar("_Value")

Message = dict[str, Any]


class Body:
    """The JSON object of a request."""

    def __init__(self, raw: bytes) -> None:
        """
        Raises:
            LiveError: it is no JSON object, or has too many values.
        """
        self.size = len(raw)  # bytes
        self._values = MOST_VALUES  # that it may have
        try:
            fields = self.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LiveError("invalid", f"the body is not JSON: {error}; send a JSON object") from error
        if not isinstance(fields, dict):
            raise LiveError("invalid", f"the body is {kind_of(fields)}; send a JSON object")
        self._fields: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}

    def decode(self, raw: bytes) -> Any:
        """Return JSON of the body, which may be a text inside it; the number of its values is bounded.

        Raises:
            LiveError: there are too many.
            msgspec.DecodeError, UnicodeDecodeError, RecursionError: it is no JSON.
        """
        self._values -= values_in(raw)
        if self._values < 0:
            raise LiveError("large", f"the body has more than {MOST_VALUES:,} values; send fewer")
        return msgspec.json.decode(raw)

    def only(self, read: Iterable[str], ignored: Iterable[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse fields that would change the reply and that the gateway does not know.

        Args:
            read: fields that the caller reads.
            ignored: fields that change nothing of a reply.
            neutral: fields with the values that ask for nothing; any other value is refused.

        Raises:
            LiveError: with the first such field.
        """
        known = {*read, *ignored}
        for name, value in self._fields.items():
            if name in known or any(value == plain and type(value) is type(plain) for plain in neutral.get(name, ())):
                continue
            if name in neutral:
                raise refusal(name, f"is {shown(value)}, which this gateway does not support; leave it out")
            raise refusal(name, "is not supported by this gateway; leave it out")

    def get(self, name: str) -> Any:
        """Return an original field; None if it is absent."""
        return self._fields.get(name)

    def text(self, name: str) -> str:
        """Return a text that must be there."""
        value = self._fields.get(name, "")
        if not isinstance(value, str) or not value:
            raise refusal(name, f"is {kind_of(value) if value != '' else 'absent'}; expected a text")
        return value

    def named(self, *names: str) -> str:
        """Return the first of some fields that is a text; "" if there is none: other values change nothing."""
        return next((value for name in names if isinstance(value := self._fields.get(name), str)), "")

    def flag(self, name: str, *, absent: bool = False) -> bool:
        """Return a truth value, or a default if it is absent."""
        value = self._fields.get(name, absent)
        if not isinstance(value, bool):
            raise refusal(name, f"is {shown(value)}; expected true or false")
        return value

    def count(self, name: str, *, least: int = 1, most: int = 2**31 - 1) -> int | None:
        """Return a whole number; None if it is absent."""
        return self._number(name, "a whole number", lambda value: type(value) is int, least, most)

    def real(self, name: str, least: float, most: float) -> float | None:
        """Return a number; None if it is absent."""
        value = self._number(name, "a number", lambda value: type(value) in (int, float), least, most)
        return None if value is None else float(value)

    def _number(self, name: str, words: str, fits: Callable[[Any], bool], least: _Value, most: _Value) -> _Value | None:
        value = self._fields.get(name)
        if value is None or (fits(value) and least <= value <= most):
            return value
        raise refusal(name, f"is {shown(value)}; expected {words} from {least} to {most}")

    def stops(self, name: str) -> list[str]:
        """Return stop sequences, written as one text or as a list of them."""
        value = self._fields.get(name, [])
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
            raise refusal(name, f"is {shown(value)}; expected a text that is not empty, or a list of such texts")
        if len(found) > MOST_STOPS:
            raise refusal(name, f"has {len(found)} entries; at most {MOST_STOPS} are taken")
        if any(len(one) > MOST_STOP_CHARS for one in found):  # they are looked for after each token
            raise refusal(name, f"has a text of more than {MOST_STOP_CHARS} characters")
        return found

    def entries(self, name: str) -> list[Message]:
        """Return a list of objects that must be there, and have an entry."""
        value = self._fields.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
            raise refusal(name, f"is {shown(value) if name in self._fields else 'absent'}; expected a list of objects")
        if len(value) > MOST_MESSAGES:
            raise refusal(name, f"has {len(value)} entries; at most {MOST_MESSAGES} are taken")
        return value


OPENAI_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role that a message of OpenAI's APIs has in a chat template, by the role that it names."""


def message_of(entry: Message, where: str, *, roles: Mapping[str, str], parts: Collection[str]) -> Message:
    """Read one message of a conversation.

    Args:
        entry: with a role and a content, a text or a list of parts of text.
        where: its place in the body, for refusals.
        roles: those that the API has, and what each is here.
        parts: types of content that hold a text.

    Raises:
        LiveError: another role; or content that is not text.
    """
    role = entry.get("role")
    if not isinstance(role, str) or role not in roles:
        raise refusal(f"{where}.role", f"is {shown(role)}; expected one of {', '.join(roles)}")
    for name in ("tool_calls", "function_call"):
        if entry.get(name):
            raise refusal(f"{where}.{name}", "is not supported by this gateway in a message of this role")
    content = entry.get("content")
    if not isinstance(content, str):
        content = text_of(content, f"{where}.content", parts)
    return {"role": roles[role], "content": content}


def text_of(content: Any, where: str, parts: Collection[str]) -> str:
    """Return the text of a message's content.

    Raises:
        LiveError: content that is not text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refusal(where, f"is {shown(content)}; expected a text, or a list of parts of text")
    texts = []
    for number, part in enumerate(content):
        found = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or found not in parts or not isinstance(part.get("text"), str):
            words = f"has the type {shown(found)}" if isinstance(part, dict) else f"is {kind_of(part)}"
            raise refusal(f"{where}[{number}]", f"{words}; this gateway takes text: {', '.join(parts)}")
        texts.append(part["text"])
    return "".join(texts)


def answerable(messages: list[Message], field: str) -> list[Message]:
    """Return the messages where something is left to answer.

    Raises:
        LiveError: there is none, or the last is the model's own.
    """
    if all(message["role"] == "system" for message in messages):
        raise refusal(field, "has no message of a user; there is nothing to answer")
    if messages[-1]["role"] == "assistant":
        raise refusal(field, "ends with a message of the assistant; this gateway does not continue a reply")
    return messages


def values_in(raw: bytes) -> int:
    """Return the number of commas and brackets of JSON outside its texts, which bounds the cost of reading it."""
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = plain.count(b'"')
    if marks > 4 * MOST_VALUES:  # each value has a key and a text at most
        return marks
    return sum(map(b"".join(plain.split(b'"')[::2]).count, (b",", b"[", b"{")))


def refusal(field: str, words: str) -> LiveError:
    """Return the error of a field of the body."""
    return LiveError("invalid", f"{field} {words}", field=field)


def shown(value: Any) -> str:
    """Return a wrong value as JSON, cut if it is long."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def kind_of(value: Any) -> str:
    """Return the name of a JSON value's type."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def schema_of(given: Any, field: str, *, inside: str = "") -> str:
    """Return the JSON schema that a reply must have, as JSON; "" if any text is allowed.

    Args:
        given: the original form; None if it is absent.
        field: of the body, for refusals.
        inside: key of the object that has the schema; "": the form itself has it.

    Raises:
        LiveError: it is no such form.
    """
    kind = given.get("type") if isinstance(given, dict) else None
    if given is None or kind == "text":
        return ""
    if kind == "json_object":
        return '{"type":"object"}'
    body = given.get(inside) if inside and isinstance(given, dict) else given
    schema = body.get("schema") if isinstance(body, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise refusal(field, f"is {shown(given)}; expected the type text, json_object, or json_schema with a schema")
    text = msgspec.json.encode(schema).decode()
    if len(text) > MOST_SCHEMA_CHARS:
        raise refusal(field, f"has a schema of {len(text):,} characters; at most {MOST_SCHEMA_CHARS:,} are taken")
    return text
