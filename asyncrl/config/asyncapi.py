"""The topic table as an AsyncAPI 3.0.0 document."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec

from asyncrl.config.fields import about, fields_of
from asyncrl.config.topics_reference import ARRAYS, header_names, parts_of
from topics.actors import BlobStored
from topics.table import BUILT_IN, Tables
from topics.topic import Topic
from topics.weights import WeightsStored

_BINARY = {"type": "string", "format": "binary"}


def asyncapi(tables: Tables = BUILT_IN) -> dict[str, Any]:
    """Channels with their subjects, messages with their schemas, and what each role sends and receives.

    MessagePack fields are described by the JSON Schema of the same data; a `bin` value is a string of format `binary`,
    with the type of its elements in `x-dtype`.
    """
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "asyncrl",
            "version": version("asyncrl"),
            "description": "Asynchronous reinforcement learning for language models: actors that talk only through "
            "these topics. Messages above 768 KiB have an empty body and name their chunks in the header `blob`.",
        },
        "defaultContentType": "application/msgpack",
        "servers": {
            "nats": {
                "host": "{host}",
                "protocol": "nats",
                "description": "NATS with JetStream; `asyncrl up` starts one and writes its address to nats.json",
                "variables": {"host": {"default": "127.0.0.1:4222", "description": "host and port"}},
            }
        },
        "channels": {topic.name: _channel(topic) for topic in tables.topics},
        "operations": {
            f"{role}.{action}.{topic.name}": _operation(topic, role, action)
            for topic in tables.topics
            for action, roles in (("send", tables.publishers_of(topic)), ("receive", tables.subscribers_of(topic)))
            for role in roles
        },
        "components": {
            "messages": {topic.message.__name__: _message(topic) for topic in tables.topics},
            "schemas": _schemas(tables),
        },
    }


def _channel(topic: Topic[Any]) -> dict[str, Any]:
    name = topic.message.__name__
    channel: dict[str, Any] = {
        "address": f"asyncrl.{{run}}.{topic.name}" + (f".{{{topic.key}}}" if topic.key else ""),
        "description": about(topic.message),
        "messages": {name: {"$ref": f"#/components/messages/{name}"}},
        "parameters": {"run": {"description": "id of the run: [a-z0-9-]{1,32}"}},
    }
    if topic.key:
        channel["parameters"][topic.key] = {"description": f"{topic.key} of the message, or of its object"}
    channel["x-stream"] = {
        "name": f"ASYNCRL_{{run}}_{topic.stream.name}",
        "keep": topic.stream.keep.value,
        "about": topic.stream.about,
    }
    channel["x-publish-to"] = topic.stream.ingest(str(channel["address"]))
    return channel


def _operation(topic: Topic[Any], role: str, action: str) -> dict[str, Any]:
    name = topic.message.__name__
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{topic.name}"},
        "summary": f"{role} {'publishes' if action == 'send' else 'subscribes to'} {topic.name}",
        "tags": [{"name": role}],
        "messages": [{"$ref": f"#/channels/{topic.name}/messages/{name}"}],
    }


def _message(topic: Topic[Any]) -> dict[str, Any]:
    kind = topic.message
    headers = ("Nats-Msg-Id", "blob", *header_names(kind))
    message: dict[str, Any] = {
        "name": kind.__name__,
        "title": kind.__name__,
        "summary": about(kind),
        "contentType": "application/json" if topic.json else "application/msgpack",
        "headers": {"type": "object", "properties": {name: {"type": "string"} for name in headers}},
        "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
    }
    if topic.message in (BlobStored, WeightsStored):
        message["contentType"] = "application/octet-stream"
        message["payload"] = {**_BINARY, "description": "one chunk of what the key names"}
    return message


def _schemas(tables: Tables) -> dict[str, Any]:
    """JSON Schema of every message and part, with the source's comment on each field."""
    messages = [topic.message for topic in tables.topics]
    kinds = list(dict.fromkeys(kind for message in messages for kind in (message, *parts_of(message))))
    _, schemas = msgspec.json.schema_components(
        kinds,
        schema_hook=lambda kind: _BINARY | {"x-dtype": ARRAYS[kind.__name__]},
        ref_template="#/components/schemas/{name}",
    )
    for kind in kinds:
        properties = schemas[kind.__name__]["properties"]
        for field in fields_of(kind):
            if field.about:
                properties[field.name] = _described(properties[field.name], field.about)
    binary: dict[str, Any] = _without_base64(schemas)
    return binary


def _described(schema: dict[str, Any], text: str) -> dict[str, Any]:
    # Other keys next to a $ref are ignored, so the reference goes into an allOf.
    return {"allOf": [schema], "description": text} if "$ref" in schema else {**schema, "description": text}


def _without_base64(value: Any) -> Any:
    """JSON needs base64 for bytes; MessagePack has `bin`."""
    if isinstance(value, list):
        return [_without_base64(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("contentEncoding") == "base64":
        return {**_BINARY, **{key: item for key, item in value.items() if key not in ("contentEncoding", "type")}}
    return {key: _without_base64(item) for key, item in value.items()}
