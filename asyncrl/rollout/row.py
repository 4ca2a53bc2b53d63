"""A row of a trajectory while its generations are put together."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from asyncrl.rollout.experts import rows_in
from topics.trajectories import Answer, Segment
from topics.wire import Int32Array, UInt8Array


class Row:
    """A segment that grows; pieces are joined once, at the end."""

    def __init__(self) -> None:
        self._tokens = np.empty(0, np.int32)
        self._sampled: list[tuple[int, Answer]] = []  # where each generation begins
        self._turns: list[int] = []  # of those, in the trajectory
        self._paths: list[str] = []  # of those

    def continues(self, ids: Int32Array) -> bool:
        """Return whether an input begins with the tokens of this row."""
        length = len(self._tokens)
        return len(ids) >= length and bool((ids[:length] == self._tokens).all())

    def observe(self, ids: Int32Array) -> None:
        """Take an input that continues this row."""
        self._tokens = ids

    def sampled(self, path: str, answer: Answer, turn: int) -> None:
        """Add the answer to the input.

        Args:
            turn: number of the generation in the trajectory.
        """
        self._turns.append(turn)
        self._paths.append(path)
        self._sampled.append((len(self._tokens), answer))
        self._tokens = np.concatenate([self._tokens, answer.tokens])

    def segment(self, *, rewarded: bool) -> Segment:
        """Return the whole row; with its turns if they have rewards."""
        length = len(self._tokens)
        mask = np.zeros(length, np.uint8)
        logprobs = np.zeros(length, np.float32)
        versions = np.full(length, -1, np.int32)
        for start, answer in self._sampled:
            end = start + len(answer.tokens)
            mask[start:end] = 1
            logprobs[start:end] = answer.logprobs
            versions[start:end] = answer.versions
        counts = [len(answer.tokens) for _, answer in self._sampled]
        turns = list(zip(self._turns, counts, strict=True)) if rewarded else []
        return Segment(tokens=self._tokens, mask=mask, logprobs=logprobs, versions=versions, turns=turns)

    def routing(self, width: int, answers: Mapping[str, Answer]) -> UInt8Array:
        """Return the experts of its tokens, [T, B]; see `RolloutContext.routing`."""
        starts = [start for start, _ in self._sampled]
        return rows_in(len(self._tokens), width, list(zip(starts, self._paths, strict=True)), answers)
