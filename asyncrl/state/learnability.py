"""Learnability: which rows of a run's data its policy solves sometimes, by the pass rates that the logs hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import Record
from asyncrl.bus.merged_reader import read_each
from asyncrl.state.samples import evaluation_of
from topics.batches import BATCH_PACKED, BatchPacked
from topics.evals import EvalScored
from topics.groups import GROUP_DROPPED
from topics.ids import member_of, stage_of
from topics.prompts import PROMPT_ISSUED, PromptIssued, PromptRow

_NONE = ""  # key of a message that carries no row of interest


class Band(NamedTuple):
    """Pass rates of rows that are worth training on.

    The defaults are those of P1 (arXiv 2511.13612): problems that the policy solves never, or in more than 70 % of its
    answers, are left out.
    """

    above: float = 0.0
    at_most: float = 0.7
    passing: float = 1.0  # least reward, before it is shaped, of an answer that passes
    groups: int = 1  # newest groups of a row whose answers are counted together


class Passes(NamedTuple):
    """The graded answers to one prompt."""

    passed: int
    graded: int


class Which(NamedTuple):
    """The groups of a run that are counted: those of training, or the answers of an evaluation."""

    task: str = ""  # of training: of this task alone; "" for all
    version: int | None = None  # that was evaluated; None for training
    dataset: str | None = None  # held-out set of the evaluation; None for the newest of any


class Selection(NamedTuple):
    """Number of different rows of each kind."""

    selected: int
    hard: int  # pass rate not above the band
    easy: int  # pass rate beyond the band
    unmeasured: int  # issued, and no group of theirs has a grade

    def __str__(self) -> str:
        measured = self.selected + self.hard + self.easy
        left_out = f"{self.hard:,} too hard, {self.easy:,} too easy, {self.unmeasured:,} issued and not measured"
        return f"{self.selected:,} of {measured:,} rows are in the band; {left_out}"


async def select_rows(bus: Bus, band: Band, which: Which, take: Callable[[PromptRow], None]) -> Selection:
    """Give each row within a band to `take`, once, in the order in which they were issued first.

    Equal rows are one row, in whichever epoch and under whichever number they were issued. Groups that were dropped
    because members failed, or were too old, are no measure.

    Raises:
        AsyncRLError: the run has no such evaluation.
    """
    passes, key_of = await _passes(bus, band, which)
    rates: dict[str, deque[Passes]] = {}  # by row, the newest last

    def count(issued: PromptIssued, _record: Record) -> None:
        if key := key_of(issued):
            found = rates.setdefault(_digest(issued.rows[0]), deque(maxlen=band.groups))
            if key in passes:
                found.append(passes[key])

    await read_each(bus, PROMPT_ISSUED, count)
    kinds = {row: _kind(band, found) for row, found in rates.items()}
    wanted = {row for row, kind in kinds.items() if kind == "selected"}

    def write(issued: PromptIssued, _record: Record) -> None:
        if key_of(issued) and (row := _digest(issued.rows[0])) in wanted:
            wanted.discard(row)
            take(issued.rows[0])

    await read_each(bus, PROMPT_ISSUED, write)
    counts = [sum(kind == name for kind in kinds.values()) for name in Selection._fields]
    return Selection(*counts)


def _kind(band: Band, found: deque[Passes]) -> str:
    """Name of the field of `Selection` that counts a row."""
    graded = sum(one.graded for one in found)
    if not graded:
        return "unmeasured"
    rate = sum(one.passed for one in found) / graded
    return "hard" if rate <= band.above else "easy" if rate > band.at_most else "selected"


async def _passes(bus: Bus, band: Band, which: Which) -> tuple[dict[str, Passes], Callable[[PromptIssued], str]]:
    """The measured groups by a key, and the key of the group whose row a message carries; `_NONE` for others."""
    if which.version is None:
        return await _of_training(bus, band), lambda issued: _training_key(issued, which.task)
    scored = await evaluation_of(bus, which.version, which.dataset)
    found: dict[str, Passes] = {}
    for one in scored.members:
        key = _eval_key(scored, member_of(one.trajectory_id))
        before = found.get(key, Passes(0, 0))
        found[key] = Passes(before.passed + (one.score >= band.passing), before.graded + 1)

    def key_of(issued: PromptIssued) -> str:
        first_answer = issued.prompt_id == scored.eval_id and issued.rows and issued.member % scored.samples == 0
        return _eval_key(scored, issued.member) if first_answer else _NONE

    return found, key_of


def _eval_key(scored: EvalScored, member: int) -> str:
    return f"{scored.eval_id}/{member // scored.samples}"


def _training_key(issued: PromptIssued, task: str) -> str:
    wanted = issued.rows and stage_of(issued.prompt_id) == "rl" and task in ("", issued.task)
    return issued.prompt_id if wanted else _NONE


async def _of_training(bus: Bus, band: Band) -> dict[str, Passes]:
    """Groups that were packed, or dropped by a filter, by prompt."""
    found: dict[str, Passes] = {}

    def count(prompt_id: str, scores: Sequence[float]) -> None:
        if scores and stage_of(prompt_id) == "rl":
            found[prompt_id] = Passes(sum(score >= band.passing for score in scores), len(scores))

    def count_batch(packed: BatchPacked, _record: Record) -> None:
        for group in packed.groups:
            count(group.prompt_id, group.scores)

    await read_each(bus, GROUP_DROPPED, lambda dropped, _record: count(dropped.prompt_id, dropped.rewards))
    await read_each(bus, BATCH_PACKED, count_batch)
    return found


def _digest(row: PromptRow) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(row))
