"""Hindsight of the teacher: log-probs of a frozen model for the tokens of a reply after a prompt with a hint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.hindsight import HINDSIGHT, best_hint
from asyncrl.algorithms.rows import TOP, TrainRow
from asyncrl.training.passes import Passes, Scorer
from asyncrl.training.vocabulary import Top
from topics.batches import Hindsight
from topics.wire import Float32Array, Int32Array

_COMPARED = 4  # likeliest tokens of each place, by which a hint is chosen


class HintedRows:
    """Fills the columns of hindsight. Every rank calls it with its own rows."""

    def __init__(self, passes: Passes, policy: Any, teacher: Scorer) -> None:
        self._passes = passes
        self._policy = policy  # a `Scorer` with `vocab_size`: the weights before the step
        self._teacher = teacher  # the same model with the weights of its pinned version

    def look_back(self, rows: Sequence[TrainRow], rule: Hindsight) -> list[TrainRow]:
        """The rows with the column `hindsight`, and with `top_k` the column `teacher_top`: ids of the tokens that the
        policy finds most probable, and the bounded differences of their log-probs.

        A row without a hint has its own log-probs there, and no differences.
        """
        hinted = self._choose([row for row in rows if row.hinted])
        found = self._passes.column(self._teacher, list(hinted.values()))
        columns: dict[int, dict[str, Float32Array]] = {
            row: {HINDSIGHT: found[id(behind)]} for row, behind in hinted.items()
        }
        if rule.top_k:
            own = [row for row in rows if id(row) in hinted]
            tops = self._tops(own, hinted, rule)
            for row in rows:
                given = columns.setdefault(id(row), {})
                given[TOP] = tops.get(id(row), np.zeros((len(row.tokens), self._count(rule.top_k), 2), np.float32))
        return [self._with(row, columns.get(id(row), {})) for row in rows]

    def _with(self, row: TrainRow, found: dict[str, Float32Array]) -> TrainRow:
        behind = found.get(HINDSIGHT)
        column = row.logprobs if behind is None else _moved(behind, row)
        top = {TOP: found[TOP]} if TOP in found else {}
        return replace(row, columns={**row.columns, HINDSIGHT: column, **top})

    def _choose(self, rows: Sequence[TrainRow]) -> dict[int, TrainRow]:
        """Return each row with the chosen hint, by the `id` of the row."""
        several = {id(row): [_behind(row, hint) for hint in row.hinted] for row in rows if len(row.hinted) > 1}
        wanted = Top(self._count(_COMPARED), self._policy.vocab_size)
        own = [row for row in rows if id(row) in several]
        policy = self._passes.column(partial(self._policy, wanted=wanted), own)
        every = [behind for candidates in several.values() for behind in candidates]
        teacher = self._passes.column(partial(self._teacher, wanted=wanted), every)
        found = {id(row): _behind(row, row.hinted[0]) for row in rows if len(row.hinted) == 1}
        for row in own:
            candidates = several[id(row)]
            ids = [_ids(teacher[id(behind)], behind) for behind in candidates]
            found[id(row)] = candidates[best_hint(_ids(policy[id(row)], row), ids)]
        return found

    def _tops(
        self, rows: Sequence[TrainRow], hinted: dict[int, TrainRow], rule: Hindsight
    ) -> dict[int, npt.NDArray[np.float32]]:
        """Ids and bounded differences of the tokens that the policy finds most probable, [T, K, 2], by row."""
        wanted = Top(self._count(rule.top_k), self._policy.vocab_size)
        policy = self._passes.column(partial(self._policy, wanted=wanted), rows)
        asked = {
            id(row): replace(hinted[id(row)], columns={TOP: _moved(policy[id(row)], hinted[id(row)])}) for row in rows
        }
        teacher = self._passes.outcomes(self._teacher, list(asked.values()))
        found = {}
        for row in rows:
            own = policy[id(row)]
            nats = _moved(teacher[id(asked[id(row)])], row)[..., : own.shape[1]] - own[..., 1]
            nats = np.where(row.mask[:, None] != 0, nats.clip(-rule.clip, rule.clip), 0.0)
            found[id(row)] = np.stack([own[..., 0], nats.astype(np.float32)], -1)
        return found

    def _count(self, wanted: int) -> int:
        return min(wanted, int(self._policy.vocab_size))


def _reply(row: TrainRow) -> int:
    """Return the tokens of the reply of a live turn, which is the end of its row."""
    return len(row.tokens) - int(np.argmax(row.versions >= 0))


def _behind(row: TrainRow, prompt: Int32Array) -> TrainRow:
    """Return the reply of a row after another prompt: the same ids, with their trained tokens."""
    reply, size = _reply(row), len(prompt)

    def moved(values: npt.NDArray[Any], fill: int) -> npt.NDArray[Any]:
        return np.concatenate([np.full(size, fill, values.dtype), values[-reply:]])

    return replace(
        row,
        tokens=np.concatenate([prompt, row.tokens[-reply:]]),
        mask=moved(row.mask, 0),
        logprobs=moved(row.logprobs, 0),
        versions=moved(row.versions, -1),
        advantages=moved(row.advantages, 0),
        weights=moved(row.weights, 0),
        columns={},
        hinted=(),
        routing=None,
    )


def _moved(values: npt.NDArray[np.float32], row: TrainRow) -> npt.NDArray[np.float32]:
    """Return the values of the reply, the last ones, at their places in another row of it; 0 elsewhere."""
    found = np.zeros((len(row.tokens), *values.shape[1:]), np.float32)
    found[-_reply(row) :] = values[-_reply(row) :]
    return found


def _ids(top: npt.NDArray[np.float32], row: TrainRow) -> Int32Array:
    ids: Int32Array = top[row.mask != 0][..., 0].astype(np.int32)
    return ids
