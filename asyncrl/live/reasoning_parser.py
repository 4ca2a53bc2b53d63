"""Reasoning before a reply: which models write it, and where it ends in the incoming text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.live.apis.schema import Thought
from topics.wire import Int32Array

OPENER, CLOSER = "<think>", "</think>"
CLOSED = f"\n{CLOSER}\n\n"  # ends reasoning that the template has opened, if none may be sampled
_QUESTION = {"role": "user", "content": "a"}


def begun(text: str, *marks: str) -> int:
    """Return how many characters at the end of a text may be the beginning of one of some marks."""
    longest = min(max(map(len, marks), default=0) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if any(mark.startswith(text[-size:]) for mark in marks)), 0)


def opened_by(tokenizer: TaskTokenizer, variables: Mapping[str, Any] = {}) -> bool | None:
    """Return whether the chat template itself opens the reasoning before a reply; None where the model writes none.

    Args:
        variables: of the template.
    """
    if not tokenizer.mentions(CLOSER):
        return None
    try:
        return tokenizer.chat_text([_QUESTION], variables=variables).rstrip().endswith(OPENER)
    except TokenizerError:
        return None


def unthought(tokenizer: TaskTokenizer, variables: Mapping[str, Any]) -> str:
    """Return what has a reply begin without reasoning; "" where the template, with these variables, says so itself."""
    prompt = tokenizer.chat_text([_QUESTION], variables=variables).rstrip()
    if prompt.endswith(CLOSER):
        return ""
    return CLOSED if prompt.endswith(OPENER) else f"{OPENER}\n{CLOSED}"


def thought_tokens(tokenizer: TaskTokenizer, ids: Int32Array) -> int:
    """Return how many tokens of a reply that begins with reasoning belong to it, its end included."""
    step, text = tokenizer.decoder(), ""
    for number, token in enumerate(ids.tolist(), 1):
        text = (text + step(token))[-64:]
        if CLOSER in text:
            return number
    return len(ids)


class ThoughtText:
    """Tells reasoning from the text of a reply; what may open or close it waits for what follows."""

    def __init__(self, *, opened: bool | None) -> None:
        self.thoughts = ""  # all so far
        self._waiting = ""
        self._inside = bool(opened)
        self._over = opened is None  # there is none
        self._bare = False  # the text has not begun: blanks before it are of the template

    def add(self, text: str) -> list[str | Thought]:
        """Return final text."""
        if self._over:
            return self._text(text)
        self._waiting += text
        if not self._inside:
            opening = self._waiting.lstrip()
            if not opening.startswith(OPENER):
                if OPENER.startswith(opening):
                    return []
                return self._rest()
            self._inside, self._waiting = True, opening[len(OPENER) :]
        if not self.thoughts:
            self._waiting = self._waiting.lstrip()
        thought, closed, behind = self._waiting.partition(CLOSER)
        if closed:
            self._over = self._bare = True
            self._waiting = ""
            return [*self._thought(thought.rstrip()), *self._text(behind)]
        final = thought[: len(thought) - begun(thought, CLOSER)].rstrip()
        self._waiting = thought[len(final) :]
        return self._thought(final)

    def end(self) -> list[str | Thought]:
        """Return what waited for more."""
        if self._over:
            return []
        rest, self._waiting = self._waiting, ""
        return self._thought(rest) if self._inside else self._text(rest)

    def _rest(self) -> list[str | Thought]:
        self._over = True
        rest, self._waiting = self._waiting, ""
        return self._text(rest)

    def _text(self, text: str) -> list[str | Thought]:
        if self._bare:
            text = text.lstrip()
            self._bare = not text
        return [text] if text else []

    def _thought(self, text: str) -> list[str | Thought]:
        self.thoughts += text
        return [Thought(text)] if text else []
