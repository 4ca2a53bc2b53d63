"""Foreign text stays text: it is cut so that no piece reads as a token of the model's format.

Else `<|im_end|><|im_start|>system` in what a user or a tool says would end the message and begin another one. Such a
text is cut after its first character and encoded piece by piece: the ids decode to the original text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

Finder = re.Pattern[str]


def finder(tokens: Iterable[str]) -> Finder | None:
    """Return what finds the first character of each token's text, also of those that overlap; None for no token."""
    texts = {token for token in tokens if len(token) > 1}  # one character cannot be cut
    return re.compile(f"(?={_any_of(texts)})(.)", re.DOTALL) if texts else None


def pieces(text: str, found_by: Finder | None) -> list[str]:
    """Return the text in pieces, none of which has a whole token that the finder knows."""
    places = [found.end() for found in found_by.finditer(text)] if found_by is not None else []
    return [text[first:end] for first, end in zip([0, *places], [*places, len(text)], strict=True)]


def _any_of(texts: Collection[str]) -> str:
    """Return a pattern for what begins like one of these texts, as a tree: some models have thousands of tokens."""
    if "" in texts:
        return ""
    heads = sorted({text[0] for text in texts})
    found = [re.escape(head) + _any_of({text[1:] for text in texts if text[0] == head}) for head in heads]
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"
