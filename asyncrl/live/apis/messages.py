"""Anthropic Messages, `/v1/messages`, and its count of tokens, `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from asyncrl.live.apis.body import Body, Message, answerable, message_of, refusal, schema_of, shown, text_of
from asyncrl.live.apis.openai import UNTHOUGHT
from asyncrl.live.apis.schema import Call, Ending, Events, Fault, LiveError, Opening, Request, assistant_message, event
from asyncrl.live.apis.tool_fields import Choice, call_of, chosen, declared, result_of

_THINKING = ("thinking", "signature")  # fields of a block
COUNT_PATH = "/v1/messages/count_tokens"

COUNTED = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "metadata")
READ = (*COUNTED, "max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream")
# A history is known without its reasoning, so `context_management` that leaves it out changes nothing.
IGNORED = ("service_tier", "speed", "cache_control", "diagnostics", "context_management")
_THREAD = "thread_unsupported_request"  # to this the tool runner of the SDK sends all messages, with no thread
_ROLES = {"user": "user", "assistant": "assistant", "system": "system"}
_STATUS: dict[Fault, tuple[int, str]] = {
    "invalid": (400, "invalid_request_error"),
    "key": (401, "authentication_error"),
    "forbidden": (403, "permission_error"),
    "absent": (404, "not_found_error"),
    "large": (413, "request_too_large"),
    "limited": (429, "rate_limit_error"),
    "internal": (500, "api_error"),
    "overloaded": (529, "overloaded_error"),
}


class Messages:
    """See `Api`."""

    path = "/v1/messages"

    def parse(self, body: bytes) -> Request:
        fields = Body(body)
        if fields.get("thread") is not None:
            words = "thread is not supported by this gateway; send all messages"
            raise LiveError("invalid", words, field="thread", code=_THREAD)
        fields.only(READ, IGNORED, {})
        tools, forced = _tools(fields)
        most = fields.count("max_tokens")
        if most is None:
            raise refusal("max_tokens", "is absent; expected a whole number from 1")
        return Request(
            fields.text("model"),
            _conversation(fields),
            most,
            fields.real("temperature", 0.0, 1.0),
            fields.real("top_p", 0.0, 1.0),
            fields.count("top_k"),
            stop=fields.stops("stop_sequences"),
            stream=fields.flag("stream"),
            tools=tools,
            parallel=not (fields.get("tool_choice") or {}).get("disable_parallel_tool_use"),
            user=_user(fields),
            forced=forced,
            schema=_schema(fields),
            thoughts=_thoughts(fields),
            **_unthought(fields),
        )

    def parse_count(self, body: bytes) -> Request:
        """Read the body of a request for the number of tokens of a prompt; errors as `parse`."""
        fields = Body(body)
        fields.only(COUNTED, IGNORED, {})
        tools, forced = _tools(fields)
        asked = Request(fields.text("model"), _conversation(fields), tools=tools, user=_user(fields))
        return msgspec.structs.replace(asked, forced=forced, schema=_schema(fields), **_unthought(fields))

    def whole(self, opening: Opening, request: Request, endings: list[Ending]) -> dict[str, Any]:
        ending = endings[0]
        content: list[dict[str, Any]] = [_thinking(ending.thoughts, opening.turn)] if ending.thoughts else []
        content += [{"type": "text", "text": ending.text}] if ending.text else []
        content += [_use(call) | {"input": call.arguments} for call in ending.calls]
        return _message(opening, _usage(opening, ending)) | {"content": content} | _stop(ending)

    def events(self, opening: Opening, request: Request, choice: int = 0) -> Events:
        return _MessageEvents(opening)

    def error(self, error: LiveError, turn: str) -> tuple[int, dict[str, Any]]:
        return _STATUS[error.fault][0], _error_body(error, turn)


class _MessageEvents:
    """See `Events`."""

    response: dict[str, Any] | None = None

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._block: Literal["", "text", "thinking"] = ""  # that is open
        self._number = 0  # of blocks that are closed

    def begin(self) -> bytes:
        message = _message(self._opening, {"input_tokens": self._opening.prompt_tokens, "output_tokens": 0})
        return _event("message_start", message=message) + self.alive()

    def text(self, delta: str) -> bytes:
        first = self._opened("text", {"type": "text", "text": ""})
        return first + _event("content_block_delta", index=self._number, delta={"type": "text_delta", "text": delta})

    def thought(self, delta: str) -> bytes:
        first = self._opened("thinking", _thinking("", ""))
        part = {"type": "thinking_delta", "thinking": delta}
        return first + _event("content_block_delta", index=self._number, delta=part)

    def _opened(self, kind: Literal["text", "thinking"], block: dict[str, Any]) -> bytes:
        """Return the begin of a block, unless it has begun."""
        if self._block == kind:
            return b""
        before, self._block = self._closed(), kind
        return before + _event("content_block_start", index=self._number, content_block=block)

    def call(self, call: Call) -> bytes:
        before, number = self._closed(), self._number
        self._number += 1
        delta = {"type": "input_json_delta", "partial_json": call.text}
        return (
            before
            + _event("content_block_start", index=number, content_block=_use(call))
            + _event("content_block_delta", index=number, delta=delta)
            + _event("content_block_stop", index=number)
        )

    def _closed(self) -> bytes:
        """Return the end of the open block, if any."""
        if not self._block:
            return b""
        kind, self._block, number, last = self._block, "", self._number, b""
        self._number += 1
        if kind == "thinking":
            signature = {"type": "signature_delta", "signature": self._opening.turn}
            last = _event("content_block_delta", index=number, delta=signature)
        return last + _event("content_block_stop", index=number)

    def alive(self) -> bytes:
        return _event("ping")

    def end(self, ending: Ending) -> bytes:
        usage = _usage(self._opening, ending)
        return self._closed() + _event("message_delta", delta=_stop(ending), usage=usage) + _event("message_stop")

    def done(self, endings: list[Ending]) -> bytes:
        return b""

    def fail(self, error: LiveError) -> bytes:
        return event(_error_body(error, self._opening.turn), "error")


def _schema(fields: Body) -> str:
    """Return the form of the reply; an effort, which agents always send, changes nothing."""
    config = fields.get("output_config")
    if config is None:
        return ""
    if not isinstance(config, dict) or set(config) - {"effort", "format"}:
        raise refusal("output_config", f"is {shown(config)}; expected an effort, a format, or both")
    return schema_of(config.get("format"), "output_config.format")


def _thoughts(fields: Body) -> Literal["", "text"]:
    thinking = fields.get("thinking")
    return "text" if isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive") else ""


def _unthought(fields: Body) -> dict[str, Any]:
    """Return the fields of a `Request` by which its reply has no reasoning; none where `thinking` is not disabled."""
    thinking = fields.get("thinking")
    disabled = isinstance(thinking, dict) and thinking.get("type") == "disabled"
    return {"reasons": False, "variables": UNTHOUGHT} if disabled else {}


def _thinking(text: str, turn: str) -> dict[str, Any]:
    """Return a block of reasoning; its signature names the turn whose stored tokens the next request continues."""
    return {"type": "thinking", "thinking": text, "signature": turn}


def _user(fields: Body) -> str:
    metadata = fields.get("metadata")
    found = metadata.get("user_id") if isinstance(metadata, dict) else None
    return found if isinstance(found, str) else ""


def _conversation(fields: Body) -> list[Message]:
    system, messages = fields.get("system"), []
    if system is not None:
        messages.append({"role": "system", "content": text_of(system, "system", ("text",))})
    for number, entry in enumerate(fields.entries("messages")):
        messages += _messages(fields, entry, f"messages[{number}]")
    return answerable(messages, "messages")


def _tools(fields: Body) -> Choice:
    choice = fields.get("tool_choice")
    if choice is not None and not isinstance(choice, dict):
        raise refusal("tool_choice", "is no object; expected one with a type")
    return chosen(fields, declared(fields, keys="", parts="input_schema"), words=("any", "tool"))


def _with_thoughts(fields: Body, entry: Message, where: str, thought: list[Message]) -> Message:
    """Read a message of the assistant that has blocks of reasoning."""
    rest = [one for one in entry["content"] if not (isinstance(one, dict) and one.get("type") == "thinking")]
    (message,) = _messages(fields, entry | {"content": rest}, where)
    texts = ["".join(text for one in thought if isinstance(text := one.get(name), str)) for name in _THINKING]
    return message | {"reasoning_content": texts[0], "turn": texts[1]}


def _messages(fields: Body, entry: Message, where: str) -> list[Message]:
    """Read a message: calls of tools join the text of the assistant, results come before that of the user."""
    content, role = entry.get("content"), entry.get("role")
    blocks = [one for one in content if isinstance(one, dict)] if isinstance(content, list) else []
    thought = [one for one in blocks if role == "assistant" and one.get("type") == "thinking"]
    if thought:
        return [_with_thoughts(fields, entry, where, thought)]
    kind = {"assistant": "tool_use", "user": "tool_result"}.get(role) if isinstance(role, str) else None
    tools = [one for one in blocks if kind is not None and one.get("type") == kind]
    if not tools:
        return [message_of(entry, where, roles=_ROLES, parts=("text",))]
    text = text_of([one for one in blocks if one.get("type") != kind], f"{where}.content", ("text",))
    if role == "assistant":
        calls = [call_of(fields, one.get("name"), one.get("id"), one.get("input"), f"{where}.content") for one in tools]
        return [assistant_message(text, calls)]
    results = [result_of(one.get("tool_use_id"), one.get("content"), f"{where}.content", ("text",)) for one in tools]
    return [*results, {"role": "user", "content": text}] if text else results


def _use(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _usage(opening: Opening, ending: Ending) -> dict[str, int]:
    """Return the tokens of a reply; those of its prompt that the engine had are counted apart."""
    fresh = opening.prompt_tokens - ending.cached
    return {"input_tokens": fresh, "cache_read_input_tokens": ending.cached, "output_tokens": ending.tokens}


def _message(opening: Opening, usage: dict[str, int]) -> dict[str, Any]:
    return {
        "id": f"msg_{opening.turn}",
        "type": "message",
        "role": "assistant",
        "model": opening.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _stop(ending: Ending) -> dict[str, Any]:
    if ending.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop}
    if ending.calls and ending.finish == "stop":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "max_tokens" if ending.finish == "length" else "end_turn", "stop_sequence": None}


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)


def _error_body(error: LiveError, turn: str) -> dict[str, Any]:
    words: dict[str, Any] = {"type": _STATUS[error.fault][1], "message": str(error)}
    if error.code == _THREAD:
        words["details"] = {"error_code": _THREAD, "unsupported": [error.field]}
    return {"type": "error", "error": words, "request_id": f"req_{turn}"}
