"""The OpenAPI document of the gateway: its paths, and the fields that each API reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.live.apis import chat, completions, messages, responses, tokenize
from asyncrl.live.apis.messages import COUNT_PATH
from asyncrl.live.apis.models import MODELS_PATH
from asyncrl.live.apis.openai import MOST_CHOICES
from asyncrl.live.apis.responses import RESPONSES_PATH
from asyncrl.live.apis.tokenize import TOKENIZE_PATH
from asyncrl.live.feedback import FEEDBACK_PATH, TEXT_CHARS

_Schema = dict[str, Any]
_TEXT: _Schema = {"type": "string"}
_FLAG: _Schema = {"type": "boolean"}
_COUNT: _Schema = {"type": "integer", "minimum": 1}
_OBJECT: _Schema = {"type": "object"}
_TEXTS: _Schema = {"type": "array", "items": _TEXT}
_OBJECTS: _Schema = {"type": "array", "items": _OBJECT}
_MESSAGES: _Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": _TEXT, "content": {"anyOf": [_TEXT, _OBJECTS, {"type": "null"}]}},
    },
}
_PENALTY: _Schema = {"type": "number", "minimum": -2, "maximum": 2}
_FIELDS: dict[str, _Schema] = {
    "model": _TEXT,
    "messages": _MESSAGES,
    "input": {"anyOf": [_TEXT, _OBJECTS]},
    "prompt": {"anyOf": [_TEXT, {"type": "array", "items": {"type": "integer", "minimum": 0}}]},
    "system": {"anyOf": [_TEXT, _OBJECTS]},
    "instructions": _TEXT,
    "previous_response_id": _TEXT,
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "top_k": {"type": "integer"},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": {"type": "number", "minimum": 0.01, "maximum": 10},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "stop_token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "return_token_ids": _FLAG,
    "chat_template_kwargs": _OBJECT,
    "reasoning_effort": _TEXT,
    "store": _FLAG,
    "add_special_tokens": _FLAG,
    "return_token_strs": _FLAG,
    "stop": {"anyOf": [_TEXT, _TEXTS]},
    "stop_sequences": _TEXTS,
    "seed": {"type": "integer"},
    "stream": _FLAG,
    "stream_options": {"type": "object", "properties": {"include_usage": _FLAG}},
    "tools": _OBJECTS,
    "parallel_tool_calls": _FLAG,
    "user": _TEXT,
    "safety_identifier": _TEXT,
    "logprobs": _FLAG,
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    "n": {"type": "integer", "minimum": 1, "maximum": MOST_CHOICES},
    "response_format": _OBJECT,
    "include": _TEXTS,
    "reasoning": _OBJECT,
    "text": _OBJECT,
    "thinking": _OBJECT,
    "metadata": _OBJECT,
}
"""Schemas of fields, by name; a field that is not here may hold any value."""

_TOO_LONG = {"413": "The body is too large."}
_REFUSED = {"400": "The request is malformed.", "401": "The API key is missing or not valid.", **_TOO_LONG}
_UNREADABLE = {"431": "The headers are too long."}
_LIMITED = {"429": "A limit of the key is reached."}
_NO_REPLY = {"404": "The model or the reply is not known.", "503": "No engine answers in time.", "529": "The same."}


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of all paths of the gateway."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "asyncrl gateway",
            "version": "1",
            "description": "The APIs of OpenAI and Anthropic, feedback, and routes for operators.",
        },
        "security": [{"bearer": []}, {"key": []}],
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        },
        "paths": {**_conversations(), **_others(), **_operations()},
    }


def _conversations() -> dict[str, Any]:
    bodies: dict[str, tuple[str, Sequence[str], Sequence[str]]] = {
        "/v1/chat/completions": ("Chat completions of OpenAI", chat.READ, ["model", "messages"]),
        "/v1/responses": ("Responses of OpenAI", responses.READ, ["model", "input"]),
        "/v1/messages": ("Messages of Anthropic", messages.READ, ["model", "messages", "max_tokens"]),
        "/v1/completions": ("Completions of OpenAI", completions.READ, ["model", "prompt"]),
        TOKENIZE_PATH: ("Token ids of a prompt", tokenize.READ, []),
        COUNT_PATH: ("Tokens of a prompt of Messages", messages.COUNTED, ["model", "messages"]),
    }
    codes = {**_REFUSED, **_UNREADABLE, **_LIMITED, **_NO_REPLY}
    return {
        path: {"post": _operation(summary, codes, _body(fields, required))}
        for path, (summary, fields, required) in bodies.items()
    }


def _others() -> dict[str, Any]:
    feedback = {
        "turn": {"type": "string", "description": "id of the reply"},
        "session": {"type": "string", "description": "name of a session, instead of a reply"},
        "thumb": {"enum": ["up", "down"]},
        "number": {"type": "number", "minimum": -1, "maximum": 1},
        "text": {"type": "string", "maxLength": TEXT_CHARS},
    }
    body = {"type": "object", "properties": feedback, "additionalProperties": False}
    absent = {"403": "The key does not consent.", "404": "There is no such reply."}
    codes = {**_REFUSED, **_UNREADABLE, **_LIMITED, **absent}
    kept = {**_REFUSED, **_LIMITED, "404": "It is not stored.", "503": "It cannot be read now."}
    response = {"parameters": [_named("id")]}
    session = _operation("End a session", {**_REFUSED, **_LIMITED, "404": "The name is empty."})
    model = _operation("A model", {**_REFUSED, "404": "There is no such model."})
    return {
        FEEDBACK_PATH: {"post": _operation("Feedback on a reply or a session", codes, body)},
        "/v1/sessions/{name}": {"delete": session | {"parameters": [_named("name")]}},
        f"{RESPONSES_PATH}/{{id}}": {
            "get": _operation("A stored response", kept) | response,
            "delete": _operation("Delete a stored response", kept) | response,
        },
        f"{RESPONSES_PATH}/{{id}}/input_items": {"get": _operation("Items of its request", kept) | response},
        MODELS_PATH: {"get": _operation("The models", _REFUSED)},
        f"{MODELS_PATH}/{{name}}": {"get": model | {"parameters": [_named("name")]}},
    }


def _operations() -> dict[str, Any]:
    ready = _operation("Readiness: whether an engine answers", {"503": "No engine is ready."}, keyed=False)
    return {
        "/health": {"get": _operation("Liveness of this process", {}, keyed=False)},
        "/ready": {"get": ready},
        "/metrics": {"get": _operation("Metrics for Prometheus", _REFUSED, content="text/plain")},
        "/openapi.json": {"get": _operation("This document", {}, keyed=False)},
    }


def _operation(
    summary: str,
    refusals: dict[str, str],
    body: _Schema | None = None,
    *,
    keyed: bool = True,
    content: str = "application/json",
) -> dict[str, Any]:
    answers = {code: {"description": words} for code, words in refusals.items()}
    media: dict[str, Any] = {content: {}}
    if body is not None and "stream" in body["properties"]:
        media["text/event-stream"] = {}
    found = {"summary": summary, "responses": {"200": {"description": "The answer.", "content": media}, **answers}}
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return found if keyed else found | {"security": []}


def _body(fields: Sequence[str], required: Sequence[str]) -> _Schema:
    properties = {name: _FIELDS.get(name, {}) for name in fields}
    return {"type": "object", "required": [*required], "properties": properties}


def _named(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
