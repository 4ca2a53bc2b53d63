"""Text of clients stays text: what reads like a control token of the model in it is encoded as ordinary characters.

Each such text gets a cut (`asyncrl/data/plain_text.py`) before the template sees it, and the rendered text is encoded
piece by piece between the cuts: no piece has the whole of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.data.plain_text import Finder, finder, pieces
from asyncrl.data.tokenizer import TaskTokenizer, TooLong
from topics.wire import Int32Array

_CUT = "\ufdd3"
_ESCAPED = "\ufdd3\ufdd4"  # this character in a text of a client: no cut has the second one after it
_CUTS = re.compile("\ufdd3(?!\ufdd4)")
_COSTLY = 2**16  # characters; of fewer the number of tokens is known soon
_UNTRUSTED = ("user", "tool")  # roles whose texts may come from anyone

Message = dict[str, Any]


class Quoted:
    """Keeps texts of clients apart from what the chat template writes."""

    def __init__(self, tokenizer: TaskTokenizer, *, most: int | None = None) -> None:
        """
        Args:
            most: tokens beyond which a text need not be encoded; None: any are taken.
        """
        self._tokenizer, self._most = tokenizer, most
        self._control = finder(tokenizer.control)
        # The assistant's own texts may have what templates write, and so may a system message that tells of it.
        self._any = finder(tokenizer.format)

    def messages(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages for the template, with cuts."""
        return [_cut(message, self._any if message["role"] in _UNTRUSTED else self._control) for message in messages]

    def tools(self, tools: Sequence[Message]) -> list[Message]:
        """Return declarations of tools for the template, with cuts."""
        return [_cut(tool, self._control) for tool in tools]

    def variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return variables for the template, with cuts."""
        return {name: _cut(value, self._any) for name, value in variables.items()}

    def encode(self, text: str) -> Int32Array:
        """Return the tokens of rendered text: [T], T may be 0.

        Raises:
            TooLong: it has certainly more than the most.
        """
        parts = [part.replace(_ESCAPED, _CUT) for part in _CUTS.split(text)]
        self.check(parts)
        return np.concatenate([self._tokenizer.encode(part) for part in parts])

    def check(self, texts: Sequence[str]) -> None:
        """Check the length of texts without encoding them.

        Raises:
            TooLong: they have certainly more than the most.
        """
        if self._most is not None and sum(map(len, texts)) > max(self._most, _COSTLY):
            least = sum(map(self._tokenizer.least, texts))
            if least > self._most:
                raise TooLong(least)


def _cut(value: Any, found_by: Finder | None) -> Any:
    if isinstance(value, str):
        return _CUT.join(pieces(value.replace(_CUT, _ESCAPED), found_by))
    if isinstance(value, dict):
        return {_cut(name, found_by): _cut(one, found_by) for name, one in value.items()}
    return [_cut(one, found_by) for one in value] if isinstance(value, list) else value
