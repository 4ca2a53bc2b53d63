"""The text of each token, for a page that has no tokenizer."""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.data.tokenizer import TaskTokenizer

_WORD = "\u2581"  # begins a word in vocabularies of SentencePiece, whose decoder drops the first space


def pieces_of(tokenizer: TaskTokenizer, ids: Iterable[int] | None = None) -> dict[int, str]:
    """Return the text of each token; of a part of a character it is U+FFFD.

    Args:
        ids: the wanted tokens; None for the whole vocabulary.
    """
    vocabulary = tokenizer.vocabulary
    found = {}
    for token in vocabulary if ids is None else ids:
        text = tokenizer.decode_all([token])
        begins_word = vocabulary.get(token, "").startswith(_WORD) and not text.startswith(" ")
        found[token] = f" {text}" if begins_word else text
    return found
