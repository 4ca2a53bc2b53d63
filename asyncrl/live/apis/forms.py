"""Forms of a reply that a request asks for: JSON, of any schema or of a given one."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.live.apis.body import refusal, shown


def schema_of(given: Any, field: str, *, inside: str = "") -> str:
    """Return the JSON schema that a reply must have, as JSON; "" where it may be any text.

    Args:
        given: the form as it came; None where it is absent.
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
    return msgspec.json.encode(schema).decode()
