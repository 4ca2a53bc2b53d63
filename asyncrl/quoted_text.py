"""Texts of clients and of the policy as data in the question to a model: between lines with a random mark."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping

# Shapes of special tokens: <|im_end|>, <end_of_turn>, </s>, [INST].
_LIKE_SPECIAL = re.compile(r"<(?=/?[\w|\uff5c\u2581-]+>)|\[(?=/?[A-Z_]{2,}\])")


def quoted(parts: Mapping[str, str], *, special: Collection[str] | None = None) -> tuple[str, str]:
    """Return a new mark, and texts between lines with this mark.

    Args:
        parts: texts by their name.
        special: texts that the tokenizer of the judge reads as special tokens; they are broken up. None: they are not
            known, and all that has the shape of one is.
    """
    texts = {name: _broken(text, special) for name, text in parts.items()}
    mark = secrets.token_hex(8)
    while any(mark in text for text in texts.values()):
        mark = secrets.token_hex(8)
    blocks = (f"===== {mark} {name} =====\n{text}\n===== {mark} end of {name} =====" for name, text in texts.items())
    return mark, "\n\n".join(blocks)


def _broken(text: str, special: Collection[str] | None) -> str:
    """Return text in which nothing is read as a special token: a space breaks what looks like one."""
    text = plain(text)
    if special is None:
        return _LIKE_SPECIAL.sub(r"\g<0> ", text)
    for token in special:
        if len(token) > 1:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def plain(text: str) -> str:
    """Return text without marks of special tokens such as `<|im_end|>`."""
    return text.replace("<|", "< |").replace("|>", "| >")
