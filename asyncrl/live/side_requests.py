"""Requests that agents make for themselves, recognised by their words: titles, compaction, heartbeats."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_SHOWN = 4000  # characters of a message that are looked at
_SYSTEM = re.compile(
    "|".join(
        (
            r"\AYou are a title generator\b",  # opencode
            r"\bYou are a helpful AI assistant tasked with summarizing conversations\b",  # Claude Code, opencode
            r"\AYou are an anchored context summarization assistant\b",  # opencode
        )
    )
)
_USER = re.compile(
    "|".join(
        (
            r"\bYour task is to create a detailed summary of (?:the|this)\b.{0,40}\bconversation\b",  # Claude Code
            r"\bYou are performing a CONTEXT CHECKPOINT COMPACTION\b",  # Codex
            r"\breply (?:with )?HEARTBEAT_OK\b",  # OpenClaw
            r"\bPre-compaction memory flush\b",  # OpenClaw
            r"\A\[cron:",  # OpenClaw
        )
    )
)


def is_side_request(messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether an agent asks this for itself: its system message or its last user message says so.

    Args:
        messages: of the request, contents are text.
    """
    if any(message["role"] == "system" and _SYSTEM.search(message["content"][:_SHOWN]) for message in messages[:4]):
        return True
    asked = next((message for message in reversed(messages) if message["role"] == "user"), None)
    return asked is not None and _USER.search(asked["content"][:_SHOWN]) is not None
