"""Differences between the ids of a conversation and the same conversation as the chat template writes it afresh."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import NamedTuple

import msgspec
import numpy as np

from asyncrl.live.reasoning_parser import CLOSER, OPENER
from asyncrl.live.tools import CallText, Wording
from topics.wire import Int32Array

_THOUGHT = re.compile(f"{re.escape(OPENER)}(.*?){re.escape(CLOSER)}", re.DOTALL)


class HistoryDifferences(NamedTuple):
    """Counts of the parts in which two writings of a conversation differ."""

    messages: int  # texts that one of the two lacks, or has in another form
    calls: int  # of tools, in one of the two
    reasoning: int  # texts of reasoning in one of the two: many templates leave earlier reasoning out
    ids: int  # recorded ids from the first to the last that differ, in messages of equal text


class _Message(NamedTuple):
    """The ids up to an end of sequence: a message, or several where the template ends replies alone."""

    ids: Int32Array  # [N] without the end
    whole: str
    text: str  # without calls and reasoning, blanks as one space
    calls: list[str]
    reasoning: list[str]


def compare_histories(recorded: Int32Array, rendered: Int32Array, wording: Wording) -> HistoryDifferences:
    """Count the differences between a recorded prompt and a fresh rendering of its messages.

    Args:
        recorded: [T] ids of the prompt of a turn.
        rendered: [U] ids that `TurnBoundary.whole` gives its messages, tools and variables.
        wording: of the model.
    """
    ours, theirs = list(_messages(recorded, wording)), list(_messages(rendered, wording))
    matcher = SequenceMatcher(None, [one.text for one in ours], [one.text for one in theirs], autojunk=False)
    messages = ids = 0
    for kind, start, end, other, other_end in matcher.get_opcodes():
        if kind != "equal":
            messages += max(end - start, other_end - other)
            continue
        pairs = zip(ours[start:end], theirs[other:other_end], strict=True)
        ids += sum(_differing(one.ids, two.ids) for one, two in pairs if one.whole == two.whole)
    calls = _unpaired([call for one in ours for call in one.calls], [call for one in theirs for call in one.calls])
    thoughts = [[thought for one in side for thought in one.reasoning] for side in (ours, theirs)]
    return HistoryDifferences(messages, calls, _unpaired(*thoughts), ids)


def _messages(ids: Int32Array, wording: Wording) -> Iterator[_Message]:
    ends = np.flatnonzero(np.isin(ids, wording.tokenizer.eos_ids))
    start = 0
    for end in (*ends.tolist(), len(ids)):
        yield _message(ids[start:end], wording)
        start = end + 1


def _message(ids: Int32Array, wording: Wording) -> _Message:
    whole = wording.tokenizer.decode_all(ids.tolist())
    reasoning = [thought.strip() for thought in _THOUGHT.findall(whole) if thought.strip()]
    text, calls = _THOUGHT.sub("", whole), list[str]()
    if wording.form is not None and (start := text.find(wording.form.opener)) >= 0:
        reader = CallText(wording.form, "")
        reader.add(text[start:])
        reader.end()
        calls = [f"{call.name} {_canonical(call.arguments)}" for call in reader.calls]
        text = text[:start] + reader.text
    return _Message(ids, whole, " ".join(text.split()), calls, reasoning)


def _canonical(arguments: object) -> str:
    return msgspec.json.encode(arguments, order="deterministic").decode()


def _differing(ids: Int32Array, others: Int32Array) -> int:
    """Return how many ids lie between the common beginning and the common end."""
    if np.array_equal(ids, others):
        return 0
    most = min(len(ids), len(others))
    before = _common(ids[:most], others[:most])
    after = _common(ids[::-1][: most - before], others[::-1][: most - before])
    return len(ids) - before - after


def _common(ids: Int32Array, others: Int32Array) -> int:
    differs = np.flatnonzero(ids != others)
    return int(differs[0]) if len(differs) else len(ids)


def _unpaired(ours: list[str], theirs: list[str]) -> int:
    one, two = Counter(ours), Counter(theirs)
    return (one - two).total() + (two - one).total()
