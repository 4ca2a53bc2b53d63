"""Tools in requests: their declarations, calls that come back, and choices, in the words of each API."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from asyncrl.live.apis.body import Body, Message, refusal, shown, text_of
from asyncrl.live.apis.schema import Call

HOSTED = ("web_search", "web_search_preview", "namespace")  # declared by agents, and not run here: left out
WORDS = ("required", "function")  # of OpenAI: see `chosen`
_MOST_TOOLS = 512


class Choice(NamedTuple):
    """Tools that the model may call, and must."""

    tools: list[Message]
    forced: str | None  # the one that it must call; "": any; None: it need not


def declared(fields: Body, *, keys: str, parts: str = "parameters", hosted: Collection[str] = ()) -> list[Message]:
    """Return the tools of a request as chat templates take them.

    Args:
        keys: "function" if a tool's name is in an object of this name, "" if it is in the tool.
        parts: the field with the JSON schema of its arguments.
        hosted: types of tools that are left out.

    Raises:
        LiveError: a tool that is none, or of a type that is not known.
    """
    given = fields.get("tools") or []
    if not isinstance(given, list) or len(given) > _MOST_TOOLS or not all(isinstance(tool, dict) for tool in given):
        raise refusal("tools", f"is {shown(given)}; expected a list of at most {_MOST_TOOLS} objects")
    found = []
    for number, tool in enumerate(given):
        kind = tool.get("type", "custom" if parts == "input_schema" else "function")
        if kind in hosted:
            continue
        if kind not in ("function", "custom") or (kind == "custom") != (parts == "input_schema"):
            raise refusal(f"tools[{number}].type", f"is {shown(kind)}; this gateway knows functions with a schema")
        function = _function(tool.get(keys) if keys else tool, f"tools[{number}]", parts)
        found.append({"type": "function", "function": function})
    return found


def _function(body: Any, where: str, parts: str) -> Message:
    name = body.get("name") if isinstance(body, dict) else None
    if not isinstance(name, str) or not name:
        raise refusal(where, "has no name")
    schema = body.get(parts) or {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise refusal(f"{where}.{parts}", f"is {shown(schema)}; expected a JSON schema")
    return {"name": name, "description": body.get("description") or "", "parameters": schema}


def chosen(fields: Body, tools: list[Message], *, words: tuple[str, str], keys: str = "") -> Choice:
    """Return the tools that the model may call, and which it must.

    Args:
        words: by which the API says that some tool must be called, and that a named one must.
        keys: field of the choice that has the name; "": the choice itself has it.

    Raises:
        LiveError: another choice, or one that no tool fits.
    """
    choice, names = fields.get("tool_choice"), [tool["function"]["name"] for tool in tools]
    kind = choice.get("type") if isinstance(choice, dict) else choice
    some, named = words
    if kind in (None, "auto"):
        return Choice(tools, None)
    if kind == "none":
        return Choice([], None)
    if kind == some:
        if not names:
            raise refusal("tool_choice", f"is {shown(choice)}, and there are no tools")
        return Choice(tools, names[0] if len(names) == 1 else "")
    body = choice.get(keys) if keys and isinstance(choice, dict) else choice
    name = body.get("name") if isinstance(body, dict) else None
    if kind != named or name not in names:
        expected = f"auto, none, {some}, or {named} with the name of one of the tools"
        raise refusal("tool_choice", f"is {shown(choice)}; expected {expected}")
    return Choice(tools, str(name))


def call_of(fields: Body, name: Any, identity: Any, arguments: Any, where: str) -> Call:
    """Read a call that comes back.

    Args:
        fields: of the body around it.
        arguments: an object, or its JSON.

    Raises:
        LiveError: it has no name, no id, or other arguments.
    """
    if isinstance(arguments, str):
        try:
            arguments = fields.decode(arguments.encode() or b"{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise refusal(where, f"has arguments that are not JSON: {error}") from error
    if not (isinstance(name, str) and name and isinstance(identity, str) and isinstance(arguments, dict)):
        raise refusal(where, "is no call: expected an id, a name, and arguments that are an object")
    return Call(identity, name, arguments)


def result_of(identity: Any, content: Any, where: str, parts: Collection[str]) -> Message:
    """Read the result of a tool.

    Raises:
        LiveError: it names no call, or is not text.
    """
    if not isinstance(identity, str) or not identity:
        raise refusal(where, "names no call: expected the id of one")
    text = "" if content is None else text_of(content, f"{where}.content", parts)
    return {"role": "tool", "content": text, "tool_call_id": identity}
