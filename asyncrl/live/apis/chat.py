"""OpenAI chat completions, `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.live.apis.body import OPENAI_ROLES, Body, Message, answerable, message_of, refusal, schema_of
from asyncrl.live.apis.openai import (
    MOST_CHOICES,
    SAMPLING,
    ChunkEvents,
    openai_error,
    prompt_ids,
    reasoning_of,
    reply_ids,
    sampling_of,
    token_logprobs,
    top_of,
    usage_of,
    wants_usage,
)
from asyncrl.live.apis.schema import Call, Ending, Events, LiveError, Opening, Request, assistant_message
from asyncrl.live.apis.tool_fields import WORDS, call_of, chosen, declared, result_of

READ = (
    *("model", "messages", "max_tokens", "max_completion_tokens"),
    *("stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls", "user", "safety_identifier"),
    *("logprobs", "top_logprobs", "n", "response_format"),
    *("reasoning_effort", "chat_template_kwargs", *SAMPLING),
)
IGNORED = (
    *("metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("verbosity", "prediction"),
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
}


class ChatCompletions:
    """See `Api`."""

    path = "/v1/chat/completions"

    def parse(self, body: bytes) -> Request:
        fields = Body(body)
        fields.only(READ, IGNORED, _NEUTRAL)
        messages = [message_in(fields, entry, f"messages[{n}]") for n, entry in enumerate(fields.entries("messages"))]
        tools, forced = chosen(fields, declared(fields, keys="function"), words=WORDS, keys="function")
        most = [fields.count(name) for name in ("max_completion_tokens", "max_tokens")]
        reasons, variables = reasoning_of(fields, fields.get("reasoning_effort"), "reasoning_effort")
        return Request(
            fields.text("model"),
            answerable(messages, "messages"),
            next((one for one in most if one is not None), None),
            **sampling_of(fields),
            stream=fields.flag("stream"),
            tools=tools,
            parallel=fields.flag("parallel_tool_calls", absent=True),
            user=fields.named("safety_identifier", "user"),
            usage=wants_usage(fields.get("stream_options")),
            logprobs=fields.flag("logprobs"),
            top_logprobs=top_of(fields, reported=fields.flag("logprobs")),
            forced=forced,
            schema=schema_of(fields.get("response_format"), "response_format", inside="json_schema"),
            thoughts="text",
            reasons=reasons,
            variables=variables,
            choices=fields.count("n", most=MOST_CHOICES) or 1,
        )

    def whole(self, opening: Opening, request: Request, endings: list[Ending]) -> dict[str, Any]:
        choices = [_choice(number, ending) for number, ending in enumerate(endings)]
        head = _head(opening) | {"object": "chat.completion"}
        body = {**head, **prompt_ids(opening), "choices": choices, "usage": usage_of(opening, endings)}
        return {**body, "system_fingerprint": _fingerprint(endings[0])}

    def events(self, opening: Opening, request: Request, choice: int = 0) -> Events:
        return _ChatEvents(_head(opening), opening, choice, usage=request.usage)

    def error(self, error: LiveError, turn: str) -> tuple[int, dict[str, Any]]:
        return openai_error(error)


class _ChatEvents(ChunkEvents):
    """See `Events`."""

    _calls = 0

    def begin(self) -> bytes:
        top = {} if self._choice else prompt_ids(self._opening)
        return self._delta({"role": "assistant", "content": ""}, top=top)

    def text(self, delta: str) -> bytes:
        return self._delta({"content": delta})

    def call(self, call: Call) -> bytes:
        number, self._calls = self._calls, self._calls + 1
        return self._delta({"tool_calls": [{"index": number, **_call(call)}]})

    def thought(self, delta: str) -> bytes:
        return self._delta({"reasoning_content": delta})

    def alive(self) -> bytes:
        return self._delta({})

    def end(self, ending: Ending) -> bytes:
        end = {"logprobs": _logprobs(ending), "finish_reason": _finish(ending), **reply_ids(ending)}
        fingerprint = _fingerprint(ending)
        return self._delta({}, end, {"system_fingerprint": fingerprint} if fingerprint else {})

    def _delta(self, delta: dict[str, Any], end: Mapping[str, Any] = {}, top: Mapping[str, Any] = {}) -> bytes:
        choice = {"index": self._choice, "delta": delta, "logprobs": None, "finish_reason": None, **end}
        return self._chunk(choice, top)


def _choice(number: int, ending: Ending) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ending.text, "refusal": None}
    if ending.calls:
        calls = [_call(call) for call in ending.calls]
        message |= {"content": ending.text or None, "tool_calls": calls}
    if ending.thoughts:
        message["reasoning_content"] = ending.thoughts
    end = {"logprobs": _logprobs(ending), "finish_reason": _finish(ending)}
    return {"index": number, "message": message, **end, **reply_ids(ending)}


def message_in(fields: Body, entry: Message, where: str) -> Message:
    """Read a message, a call of tools, or the result of one."""
    if entry.get("role") == "tool":
        return result_of(entry.get("tool_call_id"), entry.get("content"), where, ("text",))
    if entry.get("role") == "assistant" and isinstance(thoughts := entry.get("reasoning_content"), str) and thoughts:
        rest = {name: value for name, value in entry.items() if name != "reasoning_content"}
        return message_in(fields, rest, where) | {"reasoning_content": thoughts}
    if not entry.get("tool_calls") or entry.get("role") != "assistant":
        return message_of(entry, where, roles=OPENAI_ROLES, parts=("text",))
    given = entry["tool_calls"]
    if not isinstance(given, list) or not all(
        isinstance(one, dict) and isinstance(one.get("function"), dict) for one in given
    ):
        raise refusal(f"{where}.tool_calls", "is no list of calls of functions")
    calls = [
        call_of(fields, called.get("name"), one.get("id"), called.get("arguments"), f"{where}.tool_calls")
        for one in given
        for called in (one["function"],)
    ]
    rest = {"role": "assistant", "content": entry.get("content") or ""}
    return assistant_message(message_of(rest, where, roles=OPENAI_ROLES, parts=("text",))["content"], calls)


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}


def _logprobs(ending: Ending) -> dict[str, Any] | None:
    if ending.sampled is None:
        return None
    return {"content": token_logprobs(ending), "refusal": None}


def _fingerprint(ending: Ending) -> str | None:
    """Return the versions of the weights that sampled a reply, as `v12` or `v12-v13`; None for an empty reply."""
    if ending.versions is None:
        return None
    oldest, newest = ending.versions
    return f"v{oldest}" if oldest == newest else f"v{oldest}-v{newest}"


def _finish(ending: Ending) -> str:
    return "tool_calls" if ending.calls and ending.finish == "stop" else ending.finish


def _head(opening: Opening) -> dict[str, Any]:
    kind = "chat.completion.chunk"
    return {"id": f"chatcmpl-{opening.turn}", "object": kind, "created": opening.created, "model": opening.model}
