"""Reasoning as an item of OpenAI Responses: its text, or that as its summary."""

from __future__ import annotations

from typing import Any

from asyncrl.live.apis.body import Message, refusal, shown
from asyncrl.live.apis.words import Opening, Request, assistant_message


def reasoning_item(opening: Opening, request: Request, text: str, *, status: str = "completed") -> dict[str, Any]:
    """Return the item.

    What stands as `encrypted_content` is no content: it names the turn, whose stored tokens the next request goes on
    with.
    """
    summary = request.thoughts == "summary"
    part = [reasoning_part(request, text)] if text else []
    item = {"id": f"rs_{opening.turn}", "type": "reasoning", "summary": part if summary else [], "status": status}
    item |= {} if summary else {"content": part}
    return item | ({"encrypted_content": opening.turn} if request.sealed_thoughts else {})


def reasoning_part(request: Request, text: str) -> dict[str, Any]:
    """Return the part of the item that has its text."""
    return {"type": "summary_text" if request.thoughts == "summary" else "reasoning_text", "text": text}


def take_reasoning(messages: list[Message], entry: Message, where: str) -> None:
    """Add an item that comes back: the message behind it joins it.

    Raises:
        LiveError: its content or its summary is no list.
    """
    given = {name: entry.get(name) or [] for name in ("content", "summary")}
    for name, found in given.items():
        if not isinstance(found, list):
            raise refusal(f"{where}.{name}", f"is {shown(found)}; expected a list of parts of text")
    parts = [part for found in given.values() for part in found if isinstance(part, dict)]
    texts = [text for part in parts if isinstance(text := part.get("text"), str)]
    sealed = entry.get("encrypted_content")
    message = assistant_message("", [], turn=sealed if isinstance(sealed, str) else "")
    messages.append(message | {"reasoning_content": "".join(texts)})


def only_reasoning(messages: list[Message]) -> bool:
    """Return whether the last message is reasoning, and its message has not come."""
    last = messages[-1] if messages else {}
    return "reasoning_content" in last and not last["content"] and "tool_calls" not in last
