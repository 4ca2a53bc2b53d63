"""The reference of all topics, from the topic table: every message's fields with their types and comments."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import msgspec

from asyncrl.config.fields import about, fields_of, markdown_table
from topics.table import BUILT_IN, Tables
from topics.topic import EVALUATIONS, Retention, Topic
from topics.wire import Message

KEPT = {
    Retention.LEDGER: "for the whole run",
    Retention.PAYLOAD: "until nothing needs it",
    Retention.LAST: "the newest of each key",
}
ARRAYS = {"Int32Array": "<i4", "Float32Array": "<f4", "UInt8Array": "u1"}
INTRODUCTION = """\
# Topics

All messages between actors. A message has the subject `asyncrl.<run>.<noun>.<participle>[.<key>]` in the
JetStream stream `ASYNCRL_<run>_<STREAM>`. It is read from there ([observe](../guides/observe.md)), and published to
`_R_.<STREAM>.` and its subject ([security](../guides/security.md#what-each-role-can-store)). Messages are MessagePack
maps from field name to value (JSON where that is noted); any MessagePack reader can read them. `Int32Array`,
`Float32Array` and `UInt8Array` are `bin` values that hold little-endian elements of `<i4`, `<f4` and `u1`. A field
that has its default may be left out. Every message also carries `v`, the version of its type: readers take `v` and
`v - 1` and ignore fields they do not know.

A message above 768 KiB has an empty body and a header `blob: id:size:xxh3:chunks` that names its chunks on
`blob.stored`. The header `Nats-Msg-Id` makes repeats harmless.

This page is printed by `asyncrl topics --markdown`, an AsyncAPI 3.0.0 document by `asyncrl topics --asyncapi`.
"""


def header_names(kind: type[Message]) -> tuple[str, ...]:
    """Names of the headers that messages of a type may have."""
    return tuple(field.encode_name for field in msgspec.structs.fields(kind.HEADERS))


def parts_of(kind: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """Structs inside a struct, outermost first, each once."""
    found: list[type[msgspec.Struct]] = []
    for field in msgspec.structs.fields(kind):
        for inner in _structs_in(field.type):
            found += [part for part in (inner, *parts_of(inner)) if part not in found]
    return found


def topics_markdown(tables: Tables = BUILT_IN) -> str:
    """The text of docs/reference/topics.md."""
    streams = [
        (f"`{stream.name}`", KEPT[stream.keep], stream.keeper or "many", stream.about) for stream in tables.streams
    ]
    topics = [
        (
            *(f"[`{topic.name}`](#{topic.name.replace('.', '')})", f"`{topic.message.__name__}`"),
            *(f"`{topic.stream.name}`", *readers_and_writers(topic, tables)),
        )
        for topic in tables.topics
    ]
    lines = [INTRODUCTION, "## Streams", "", *markdown_table(("stream", "kept", "written by", "about"), streams)]
    columns = ("topic", "message", "stream", "publishers", "subscribers")
    lines += ["", "## All topics", "", *markdown_table(columns, topics)]
    for topic in tables.topics:
        lines += ["", *topic_section(topic, tables)]
    lines += ["", "## Parts of messages"]
    for part in dict.fromkeys(part for topic in tables.topics for part in parts_of(topic.message)):
        lines += ["", f"### {part.__name__}", "", about(part), "", *_field_table(part)]
    return "\n".join(lines) + "\n"


def readers_and_writers(topic: Topic[Any], tables: Tables) -> list[str]:
    """Publishers and subscribers: `rollout, reward`; `all` for every role of a run."""
    named = (tables.publishers_of(topic), tables.subscribers_of(topic))
    return ["all" if names is tables.role_names else ", ".join(names) for names in named]


def topic_section(topic: Topic[Any], tables: Tables) -> list[str]:
    """Lines about a topic and the fields of its message, as Markdown."""
    key = f".<{topic.key}>" if topic.key else ""
    lane = f", of evaluations `asyncrl.<run>.{topic.name}.{EVALUATIONS}{key}`" if topic.lane else ""
    publishers, subscribers = readers_and_writers(topic, tables)
    where = f"in `{topic.stream.name}`, kept {KEPT[topic.stream.keep]}"
    lines = [
        f"### {topic.name}",
        "",
        about(topic.message),
        "",
        f"- subject `asyncrl.<run>.{topic.name}{key}`{lane}, {where}{', as JSON' if topic.json else ''}",
        f"- `{topic.message.__name__}`, published by {publishers}; subscribed to by {subscribers}",
    ]
    headers = header_names(topic.message)
    if headers:
        lines.append("- headers " + ", ".join(f"`{name}`" for name in headers))
    return [*lines, "", *_field_table(topic.message)]


def _field_table(kind: type[msgspec.Struct]) -> list[str]:
    rows = []
    for field in fields_of(kind):
        values = get_args(field.type) if get_origin(field.type) is Literal else ()
        written = " or ".join(f'"{value}"' for value in values) or field.written
        required = field.default is msgspec.NODEFAULT
        default = "required" if required else f"`{msgspec.json.encode(field.default, enc_hook=list).decode()}`"
        if field.name != "v":  # which every message has
            rows.append((f"`{field.name}`", f"`{written}`", default, field.about))
    return markdown_table(("field", "type", "default", "about"), rows)


def _structs_in(annotation: Any) -> list[type[msgspec.Struct]]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return [annotation]
    return [struct for argument in get_args(annotation) for struct in _structs_in(argument)]
