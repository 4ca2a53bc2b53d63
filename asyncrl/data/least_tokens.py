"""How many tokens a text has at least, told without encoding it: a long one takes seconds of a core.

No token represents more digits than M, the largest number of digits of any token. So a text with N digits has at least
N / M tokens; the same holds for letters, for each single byte, and so on. The end of a word, a character followed by
white space, is within a token or between two: texts with N such places have at least (N + 1) / (M + 1) tokens, and in
most vocabularies M is 0 for ends by a space. White space counts nowhere else: tokens that are added to a vocabulary may
swallow any amount of it.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

_BLOCK = 4096  # tokens whose bytes are counted at once
_PRINTED = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTED]
# The bytes that a byte-level vocabulary writes as these characters (GPT-2).
_BYTES = {byte: byte for byte in _PRINTED} | {256 + number: byte for number, byte in enumerate(_HIDDEN)}
_Bytes = npt.NDArray[np.uint8]
_Flags = npt.NDArray[np.bool_]
_Counts = npt.NDArray[np.int64]


def _of(text: bytes) -> _Flags:
    """Return which bytes a text contains: [256]."""
    return np.isin(np.arange(256), np.frombuffer(text, np.uint8))


_WHITE = _of(b" \t\n\r\v\f")
_SAID, _HIGH = ~_WHITE, np.arange(256) >= 128
_LETTERS = _of(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_DIGITS = _of(b"0123456789")
_GROUPS = np.array([_SAID, _LETTERS, _DIGITS, _HIGH, _SAID & ~_LETTERS & ~_DIGITS & ~_HIGH]).astype(np.int64)
_ENDS = (_of(b" "), _WHITE)  # of words


class LeastTokens:
    """The bound of one tokenizer."""

    def __init__(self, tokens: Sequence[bytes], *, composes: bool) -> None:
        """
        Args:
            tokens: the longest text of each.
            composes: texts are brought into the normal form NFC before they are encoded.
        """
        self._composes = composes
        most, ends = np.zeros(256 + len(_GROUPS), np.int64), np.zeros(len(_ENDS), np.int64)
        for begin in range(0, len(tokens), _BLOCK):
            block = tokens[begin : begin + _BLOCK]
            whose = np.repeat(np.arange(len(block)), [len(text) for text in block])
            raw = np.frombuffer(b"".join(block), np.uint8)
            counts = np.bincount(whose * 256 + raw, minlength=256 * len(block)).reshape(-1, 256)
            most = np.maximum(most, _grouped(counts).max(axis=0))
            inside = whose[1:] == whose[:-1]
            found = [np.bincount(whose[1:][place & inside], minlength=1).max() for place in _word_ends(raw)]
            ends = np.maximum(ends, found)
        self._most, self._ends = np.maximum(most, 1), ends

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> LeastTokens | None:
        """Return the bound of a tokenizer; None if a token may represent text of any length.

        It is known for byte-level BPE, and for a vocabulary of whole pieces without a token for unknown text.
        """
        form = json.loads(tokenizer.to_str())
        normalizers, splits = _parts(form["normalizer"], "normalizers"), _parts(form["pre_tokenizer"], "pretokenizers")
        if any(one["type"] != "NFC" for one in normalizers) or not all(map(_keeps_text, splits)):
            return None
        model, words = form["model"], tokenizer.get_vocab(with_added_tokens=False)
        if model["type"] == "BPE" and any(one["type"] == "ByteLevel" for one in splits):
            if not all(chr(character) in words for character in _BYTES):
                return None
            texts = [_bytes_of(word) for word in words]
        elif model["type"] == "WordLevel" and model["unk_token"] not in words:
            texts = [word.encode() for word in words]
        else:
            return None
        added = map(_added, tokenizer.get_added_tokens_decoder().values())
        return cls([*texts, *added], composes=bool(normalizers))

    def __call__(self, text: str) -> int:
        """Return a number of tokens than which a text has no less."""
        if self._composes and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        raw = np.frombuffer(text.encode(errors="ignore"), np.uint8)
        counts = _grouped(np.bincount(raw, minlength=256)[None, :])[0]
        ends = [int(place.sum()) for place in _word_ends(raw)]
        by_ends = [-(-(count + 1) // (int(most) + 1)) for count, most in zip(ends, self._ends, strict=True) if count]
        return max(int((-(-counts // self._most)).max()), *by_ends, 0)


def _grouped(counts: _Counts) -> _Counts:
    """Return counts of single bytes, white space left out, and of groups of them: [N, 256] to [N, 256 + G]."""
    return np.concatenate([np.where(_WHITE, 0, counts), counts @ _GROUPS.T], axis=1)


def _word_ends(raw: _Bytes) -> Iterator[_Flags]:
    """Return the ends of words by each kind of white space: [B - 1] whether it follows the end of one."""
    said = _SAID[raw[:-1]]
    return (said & kind[raw[1:]] for kind in _ENDS)


def _parts(given: dict[str, Any] | None, several: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer."""
    if given is None:
        return []
    return [one for part in given[several] for one in _parts(part, several)] if given["type"] == "Sequence" else [given]


def _keeps_text(split: dict[str, Any]) -> bool:
    return split["type"] in ("ByteLevel", "Digits") or (split["type"] == "Split" and split["behavior"] != "Removed")


def _bytes_of(word: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary."""
    if all(ord(character) in _BYTES for character in word):
        return bytes(_BYTES[ord(character)] for character in word)
    return word.encode()


def _added(token: AddedToken) -> bytes:
    """Return the text of an added token, with the white space that it absorbs."""
    return b" " * token.lstrip + token.content.encode() + b" " * token.rstrip
