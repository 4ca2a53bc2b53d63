"""Stop strings: looked for in the text of the newest tokens, after each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]


def reach_of(stop: Sequence[str]) -> int:
    """Return how many tokens may hold the longest of these strings and one more: a token has at least a byte."""
    return max(len(text.encode()) for text in stop) + 1


def stop_string(tokens: Sequence[int], stop: Sequence[str], decode: Decode) -> str | None:
    """The stop string that the last of these tokens completes, if it does.

    Args:
        tokens: [T] all that was sampled so far.
        stop: at least one.
        decode: tokens to text, special tokens included.
    """
    tail = decode(list(tokens[-reach_of(stop) :]))
    return next((text for text in stop if text in tail), None)
