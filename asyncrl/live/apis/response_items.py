"""Items of stored responses: references to them in requests, and the list of those that a request had."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.live.apis.body import Body, Message, refusal, shown
from asyncrl.live.apis.schema import LiveError

REFERENCE = "item_reference"
"""Type of an entry of the input that stands for an item of a stored response."""
_MOST_KEPT = 2**18  # bytes of the items of a request
_MOST_LISTED = 100
_TURN = re.compile(r"(?:msg|rs|fc_call)_([0-9a-f]{24})(?:_[0-9]+)?")  # ids of items of a reply, with its turn


def references(fields: Body) -> list[str]:
    """Return the ids of the items that a request refers to, in their order.

    Raises:
        LiveError: the input is malformed, or a reference has no id.
    """
    if not isinstance(fields.get("input"), list):
        return []
    found = []
    for number, entry in enumerate(fields.entries("input")):
        if entry.get("type") == REFERENCE:
            identity = entry.get("id")
            if not isinstance(identity, str):
                raise refusal(f"input[{number}].id", f"is {shown(identity)}; expected the id of an item")
            found.append(identity)
    return found


def turn_of(identity: str) -> str:
    """Return the turn whose reply has an item; "" where the id is that of no item of a reply."""
    found = _TURN.fullmatch(identity)
    return found[1] if found else ""


def resolved(body: bytes, items: Mapping[str, Message], most_bytes: int) -> bytes:
    """Return a request with items in the places of its references.

    Args:
        items: by id, all that it refers to.
        most_bytes: of the request with the items.

    Raises:
        LiveError: the request with the items is larger.
    """
    fields = msgspec.json.decode(body)
    sizes = {name: len(msgspec.json.encode(item)) for name, item in items.items()}
    if len(body) + sum(sizes[entry["id"]] for entry in fields["input"] if entry.get("type") == REFERENCE) > most_bytes:
        raise LiveError("large", f"the body with the items that it refers to is larger than {most_bytes:,} bytes")
    fields["input"] = [items[entry["id"]] if entry.get("type") == REFERENCE else entry for entry in fields["input"]]
    return msgspec.json.encode(fields)


def input_of(fields: Body) -> bytes:
    """Return the items of a request as JSON; b"" where they are too large to be kept."""
    given = fields.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    raw = msgspec.json.encode(items)
    return raw if len(raw) <= _MOST_KEPT else b""


def listed(items: Sequence[Message], turn: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of the items of a request.

    Args:
        items: as they came.
        turn: that answered it, of which ids are made.
        query: `limit` (20), `order` (desc) and `after`, the id of an item.

    Raises:
        LiveError: one of these is malformed.
    """
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not limit.isdecimal() or not 1 <= int(limit) <= _MOST_LISTED:
        raise refusal("limit", f"is {shown(limit)}; expected a whole number from 1 to {_MOST_LISTED}")
    if order not in ("asc", "desc"):
        raise refusal("order", f"is {shown(order)}; expected asc or desc")
    named = [_named(item, f"in_{turn}_{number}") for number, item in enumerate(items)]
    named = named if order == "asc" else named[::-1]
    ids = [item["id"] for item in named]
    if after is not None and after not in ids:
        raise refusal("after", f"is {shown(after)}, which is no item of this response")
    begin = 0 if after is None else ids.index(after) + 1
    page = named[begin : begin + int(limit)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, "has_more": begin + len(page) < len(named), **ends}


def _named(item: Message, identity: str) -> Message:
    """Return an item with an id, a type, and its text in parts."""
    item = {"id": identity, "type": "message", **item}
    if item["type"] == "message" and isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": kind, "text": item["content"]}]
    return item
