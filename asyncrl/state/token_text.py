"""Tokens of a trajectory as coloured text: by version, log-prob or mask."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from rich.text import Text

from asyncrl.telemetry.printable import printable
from topics.trajectories import Segment

ColourBy: TypeAlias = Literal["version", "logprob", "mask"]
COLOURS: tuple[ColourBy, ...] = get_args(ColourBy)
_OBSERVED = "dim"
_VERSIONS = ("cyan", "yellow", "magenta", "green", "blue", "red")  # in turn, by number of the version
_LOGPROBS = ((-0.1, "green"), (-1.0, "cyan"), (-3.0, "yellow"), (-np.inf, "bold red"))  # at or above each, nats
_SAMPLED = "reverse"


def legend(segments: Sequence[Segment], by: ColourBy) -> Text:
    """Return what the colours mean."""
    line = Text()
    if by == "version":
        sampled = {int(version) for one in segments for version in np.unique(one.versions[one.mask != 0])}
        for version in sorted(sampled):
            line.append(f"version {version}" if version >= 0 else "teacher", _version_style(version)).append("  ")
    elif by == "logprob":
        for bound, style in _LOGPROBS:
            line.append(f">= {bound:g}" if np.isfinite(bound) else "below", style).append("  ")
    else:
        line.append("sampled", _SAMPLED).append("  ")
    return line.append("observed", _OBSERVED)


def coloured(segment: Segment, texts: Sequence[str], by: ColourBy, begin: int = 0) -> Text:
    """Return the tokens of a segment from a position on, in colours.

    Args:
        texts: [T] of its tokens.
    """
    styles = _styles(segment, by)[begin:]
    line = Text()
    for style, run in groupby(zip(styles, texts[begin:], strict=True), key=lambda one: one[0]):
        line.append(printable("".join(text for _, text in run)), style)
    return line


def _styles(segment: Segment, by: ColourBy) -> list[str]:
    sampled: npt.NDArray[np.bool_] = segment.mask != 0
    if by == "mask":
        return [_SAMPLED if one else _OBSERVED for one in sampled]
    if by == "version":
        values = zip(sampled.tolist(), segment.versions.tolist(), strict=True)
        return [_version_style(version) if one else _OBSERVED for one, version in values]
    logprobs = zip(sampled.tolist(), segment.logprobs.tolist(), strict=True)
    return [next(style for bound, style in _LOGPROBS if p >= bound) if one else _OBSERVED for one, p in logprobs]


def _version_style(version: int) -> str:
    return _VERSIONS[version % len(_VERSIONS)] if version >= 0 else "bold"
