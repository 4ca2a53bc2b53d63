"""Measures of a completion that need no label: filters of groups read them."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from topics.trajectories import Segment, TrajectoryGenerated

_GRAM = 4  # tokens
_NO_WRITING = {"Cc", "Cs", "Co", "Cn"}  # control, surrogate, private use, unassigned
_REPLACEMENT = "\ufffd"  # what decoders put in the place of bytes that are no text


def quality(generated: TrajectoryGenerated, names: Iterable[str]) -> dict[str, float]:
    """Measures of a trajectory by name, of those in `asyncrl.algorithms.filters.QUALITY`."""
    return {name: round(_MEASURES[name](generated), 6) for name in names}


def repetition(segments: Sequence[Segment]) -> float:
    """Share of repeated 4-grams of sampled tokens; 0 without 4-grams.

    Source: rep-n of unlikelihood training (arXiv 1908.04319, section 6.1): 1 - distinct n-grams / n-grams.
    """
    sampled = [segment.tokens[segment.mask != 0] for segment in segments]
    windows = [np.lib.stride_tricks.sliding_window_view(tokens, _GRAM) for tokens in sampled if len(tokens) >= _GRAM]
    if not windows:
        return 0.0
    grams = np.ascontiguousarray(np.concatenate(windows))
    raw, size = grams.tobytes(), _GRAM * grams.itemsize
    distinct = {raw[start : start + size] for start in range(0, len(raw), size)}  # quicker than a sort
    return 1.0 - len(distinct) / len(grams)


def garbage(text: str) -> float:
    """Share of the characters of a text that no writing has; white space is writing."""
    found = text.count(_REPLACEMENT)
    if not (seen := "".join(text.split())).isprintable():  # else no character is of these categories
        found += sum(unicodedata.category(character) in _NO_WRITING for character in seen)
    return found / len(text) if text else 0.0


_MEASURES: dict[str, Callable[[TrajectoryGenerated], float]] = {
    "repetition": lambda generated: repetition(generated.segments),
    "garbage": lambda generated: garbage(generated.completion),
}
