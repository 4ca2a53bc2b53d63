"""Names of weights, trajectories and prompts (a letter for the origin, then a number), and sets of numbers.

The sets stay small for any number of prompts, because ended numbers form few spans."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from operator import itemgetter
from typing import Literal, TypeAlias

import msgspec

Stage: TypeAlias = Literal["warmup", "rl", "eval"]

WARMUP = "w"  # the warm-up rows have a separate order
TASK = "p"
REISSUE = "r"  # `r000003`: the fourth request to issue a prompt's row again
LIVE = "l"  # `l000042`: the 43rd turn of live traffic that was admitted to training
EVALUATION = "e"  # `e000003`: the fourth evaluation, whose members are held-out prompts

LETTERS = WARMUP + TASK + REISSUE + LIVE + EVALUATION

TRAJECTORY_ID = re.compile(r"[a-z]\d{1,12}-\d{1,5}\Z", re.ASCII)  # what a subject may name
_PROMPT_ID = re.compile(r"[a-z]\d{6,12}\Z", re.ASCII)  # as `prompt_name` writes it
_STAGES: dict[str, Stage] = {WARMUP: "warmup", EVALUATION: "eval"}
_FIRST = itemgetter(0)


def prompt_name(letter: str, number: int) -> str:
    """`p000042`."""
    return f"{letter}{number:06d}"


def weights_name(lineage: int, version: int, digest: str) -> str:
    """Name of weights on engines: `lineage:version:digest`."""
    return f"{lineage}:{version}:{digest}"


def trajectory_name(prompt_id: str, member: int) -> str:
    """`p000042-3`."""
    return f"{prompt_id}-{member}"


def is_prompt_id(name: str, letters: str = LETTERS) -> bool:
    """Return whether it is the name of a prompt with one of these letters."""
    return name[:1] in letters and _PROMPT_ID.match(name) is not None


def letter_of(name: str) -> str:
    """`p` of `p000042` and of `p000042-3`."""
    return name[:1]


def prompt_of(trajectory_id: str) -> str:
    """`p000042` of `p000042-3`, and of itself."""
    return trajectory_id.rsplit("-", 1)[0]


def member_of(trajectory_id: str) -> int:
    """3 of `p000042-3`."""
    return int(trajectory_id.rsplit("-", 1)[1])


def number_of(prompt_id: str) -> int:
    """42 of `p000042`.

    Raises:
        ValueError: it is no letter with a number.
    """
    return int(prompt_id[1:])


def stage_of(name: str) -> Stage:
    """The stage of a prompt or a trajectory."""
    return _STAGES.get(name[:1], "rl") if name[1:2].isdigit() else "rl"


class PromptIdSet(msgspec.Struct):
    """A set of names such as `p000042`: for each letter, spans [first, end) of numbers in rising order."""

    spans: dict[str, list[list[int]]] = {}

    def __contains__(self, name: str) -> bool:
        spans, number = self.spans.get(name[:1], []), number_of(name)
        at = bisect_right(spans, number, key=_FIRST)
        return at > 0 and number < spans[at - 1][1]

    def add(self, name: str) -> None:
        """Put a name in.

        Raises:
            ValueError: it is no letter with a number.
        """
        number = number_of(name)
        spans = self.spans.setdefault(name[:1], [])
        at = bisect_right(spans, number, key=_FIRST)  # spans that begin at or below it
        if at and number < spans[at - 1][1]:
            return
        end = spans.pop(at)[1] if at < len(spans) and spans[at][0] == number + 1 else number + 1
        if at and spans[at - 1][1] == number:
            spans[at - 1][1] = end
        else:
            spans.insert(at, [number, end])

    def least_missing(self, letter: str) -> int:
        """The smallest number that is not in it."""
        spans = self.spans.get(letter)
        return spans[0][1] if spans and spans[0][0] == 0 else 0

    def missing(self, letter: str, first: int, end: int) -> Iterator[int]:
        """The numbers from `first` on and below `end` that are not in it."""
        for begin, behind in self.spans.get(letter, []):
            yield from range(first, min(begin, end))
            first = max(first, behind)
        yield from range(first, end)
