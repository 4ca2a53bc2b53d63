"""Text of clients stays text: what reads like a control token of the model in it is encoded as ordinary characters.

Else `<|im_end|><|im_start|>system` in a user's message would end it and begin one that the user never may write. Each
such text gets a cut behind its first character before the template sees it, and what is rendered is encoded piece by
piece between the cuts: no piece has the whole of it, and the ids decode to the text as it came.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from asyncrl.data.tokenizer import TaskTokenizer
from topics.wire import Int32Array

_CUT = "\ufdd3"
# Unicode keeps these from ever standing for a character; templates are rendered with them as marks of our own.
_MARKS = re.compile("[\ufdd0\ufdd1\ufdd3]")
_UNTRUSTED = ("user", "tool")  # roles whose texts come from whoever talks to a client, or from anywhere

Message = dict[str, Any]


class Quoted:
    """Keeps texts of clients apart from what the chat template writes."""

    def __init__(self, tokenizer: TaskTokenizer) -> None:
        self._tokenizer = tokenizer
        self._control = _finder(tokenizer.control)
        # Templates write tokens too that are not flagged as special: `<tool_response>`, or all of DeepSeek's roles.
        # The assistant's own texts may have them, and so may a system message that tells of them.
        self._any = _finder([*tokenizer.control, *tokenizer.written])

    def messages(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages for the template, with cuts."""
        return [_cut(message, self._any if message["role"] in _UNTRUSTED else self._control) for message in messages]

    def tools(self, tools: Sequence[Message]) -> list[Message]:
        """Return declarations of tools for the template, with cuts."""
        return [_cut(tool, self._control) for tool in tools]

    def encode(self, text: str) -> Int32Array:
        """Return the tokens of rendered text: [T], T may be 0."""
        return np.concatenate([self._tokenizer.encode(piece) for piece in text.split(_CUT)])


def _finder(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Return what finds the first character of each token's text, also of those that overlap; None for no token."""
    texts = {token for token in tokens if len(token) > 1}  # one character cannot be cut
    return re.compile(f"(?={_any_of(texts)})(.)", re.DOTALL) if texts else None


def _any_of(texts: Collection[str]) -> str:
    """Return a pattern for what begins like one of these texts, as a tree: some models have thousands of tokens."""
    if "" in texts:
        return ""
    heads = sorted({text[0] for text in texts})
    found = [re.escape(head) + _any_of({text[1:] for text in texts if text[0] == head}) for head in heads]
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


def _cut(value: Any, finder: re.Pattern[str] | None) -> Any:
    if isinstance(value, str):
        plain = _MARKS.sub("", value)
        return plain if finder is None else finder.sub(rf"\1{_CUT}", plain)
    if isinstance(value, dict):
        return {_cut(name, finder): _cut(one, finder) for name, one in value.items()}
    return [_cut(one, finder) for one in value] if isinstance(value, list) else value
