"""Fields of a request that a response of OpenAI's Responses repeats."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.live.apis.body import Body

REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""Their values if they are absent. Those that are ignored are not repeated, but `metadata`."""

_MOST = 2**18  # bytes of them: they are kept while their request waits, and sent with several events


def repeated_of(fields: Body) -> dict[str, Any]:
    """Return the original fields of a request; if they are too large together, the largest are left out."""
    given = {name: value for name in REPEATED if (value := fields.get(name)) is not None}
    if fields.size <= _MOST:
        return given
    room, sizes = _MOST, {name: len(msgspec.json.encode(value)) for name, value in given.items()}
    for name in sorted(sizes, key=lambda one: sizes[one]):
        room -= sizes[name]
        if room < 0:
            del given[name]
    return given
