"""The reference of all topics, from the topic table: every message's fields with their types and comments."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from topics.roles import ROLE_NAMES
from topics.table import TOPICS, subscribers_of
from topics.topic import STREAMS, Retention, Topic
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
JetStream stream `ASYNCRL_<run>_<STREAM>`. It is read from there ([observe.md](observe.md)), and published to
`_R_.<STREAM>.` and its subject ([security.md](security.md#what-each-role-can-store)). Messages are MessagePack maps
from field name to value (JSON where that is noted); any MessagePack reader can read them. `Int32Array`, `Float32Array`
and `UInt8Array` are `bin` values that hold little-endian elements of `<i4`, `<f4` and `u1`. A field that has its
default may be left out. Every message also carries `v`, the version of its type: readers take `v` and `v - 1` and
ignore fields they do not know.

A message above 768 KiB has an empty body and a header `blob: id:size:xxh3:chunks` that names its chunks on
`blob.stored`. The header `Nats-Msg-Id` makes repeats harmless.

This page is printed by `asyncrl topics --markdown`, an AsyncAPI 3.0.0 document by `asyncrl topics --asyncapi`.
"""


class FieldDoc(NamedTuple):
    """One field of a message."""

    name: str
    type: str  # as it is written in the source; the values where it has a few
    default: str  # JSON; "" where the field is required
    about: str


def about(kind: type[Any]) -> str:
    """Docstring of a message type, in one paragraph."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split())


def fields_of(kind: type[msgspec.Struct]) -> tuple[FieldDoc, ...]:
    """Fields of a struct, own ones first, without the `v` that every message has."""
    written = _written(kind)
    found = []
    for field in msgspec.structs.fields(kind):
        if field.name == "v":
            continue
        type_text, comment = written[field.name]
        if get_origin(field.type) is Literal:
            type_text = " or ".join(f'"{value}"' for value in get_args(field.type))
        found.append(FieldDoc(field.name, type_text, _default(field), comment))
    return tuple(found)


def headers_of(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Names of the headers that a message's `headers` method gives it."""
    method = getattr(kind, "headers", None)
    if not inspect.isfunction(method):  # a dead letter has a field of this name
        return ()
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    names = [
        key.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    ]
    return tuple(str(name) for name in names)


def parts_of(kind: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """Structs inside a struct, outermost first, each once."""
    found: list[type[msgspec.Struct]] = []
    for field in msgspec.structs.fields(kind):
        for inner in _structs_in(field.type):
            found += [part for part in (inner, *parts_of(inner)) if part not in found]
    return found


def topics_markdown() -> str:
    """The text of docs/topics.md."""
    lines = [INTRODUCTION, "## Streams", "", "| stream | kept | written by | about |", "|---|---|---|---|"]
    for stream in STREAMS:
        writer = stream.keeper or "many"
        lines.append(f"| `{stream.name}` | {KEPT[stream.keep]} | {writer} | {stream.about} |")
    lines += [
        "",
        "## All topics",
        "",
        "| topic | message | stream | publishers | subscribers |",
        "|---|---|---|---|---|",
    ]
    for topic in TOPICS:
        anchor = topic.name.replace(".", "")
        lines.append(
            f"| [`{topic.name}`](#{anchor}) | `{topic.message.__name__}` | `{topic.stream.name}` | "
            f"{roles(topic.publishers)} | {roles(subscribers_of(topic))} |"
        )
    for topic in TOPICS:
        lines += ["", *_topic_section(topic)]
    lines += ["", "## Parts of messages"]
    parts: list[type[msgspec.Struct]] = []
    for topic in TOPICS:
        parts += [part for part in parts_of(topic.message) if part not in parts]
    for part in parts:
        lines += ["", f"### {part.__name__}", "", about(part), "", *_field_table(part)]
    return "\n".join(lines) + "\n"


def roles(names: Sequence[str]) -> str:
    """`rollout, reward`; `all` where it is every role of a config."""
    return "all" if names is ROLE_NAMES else ", ".join(names)


def _topic_section(topic: Topic[Any]) -> list[str]:
    key = f".<{topic.key}>" if topic.key else ""
    where = f"in `{topic.stream.name}`, kept {KEPT[topic.stream.keep]}"
    lines = [
        f"### {topic.name}",
        "",
        about(topic.message),
        "",
        f"- subject `asyncrl.<run>.{topic.name}{key}`, {where}{', as JSON' if topic.json else ''}",
        f"- `{topic.message.__name__}`, published by {roles(topic.publishers)}; "
        f"subscribed to by {roles(subscribers_of(topic))}",
    ]
    headers = headers_of(topic.message)
    if headers:
        lines.append("- headers " + ", ".join(f"`{name}`" for name in headers))
    return [*lines, "", *_field_table(topic.message)]


def _field_table(kind: type[msgspec.Struct]) -> list[str]:
    lines = ["| field | type | default | about |", "|---|---|---|---|"]
    for field in fields_of(kind):
        default = f"`{field.default}`" if field.default else "required"
        cells = (f"`{field.name}`", f"`{field.type}`", default, field.about)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return ""
    made = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return msgspec.json.encode(made, enc_hook=list).decode()


def _structs_in(annotation: Any) -> list[type[msgspec.Struct]]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return [annotation]
    return [struct for argument in get_args(annotation) for struct in _structs_in(argument)]


def _written(kind: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """Field name to its annotation and the comment on its line, over the class and those it inherits from."""
    found: dict[str, tuple[str, str]] = {}
    for base in kind.__mro__:
        if base in (Message, msgspec.Struct) or not issubclass(base, msgspec.Struct):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        comments = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                comment = comments.get(node.end_lineno or node.lineno, "")
                found.setdefault(node.target.id, (ast.unparse(node.annotation), comment))
    return found
