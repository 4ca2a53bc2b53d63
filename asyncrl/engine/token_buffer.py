"""Tokens of an open generation."""

from __future__ import annotations

from typing import Any

import numpy as np

from topics.trajectories import Answer
from topics.wire import Float32Array, Int32Array


class TokenBuffer:
    """Appends sampled tokens to an open generation: the one place where tokens enter a trajectory.

    The arrays have room to grow, so that a token costs the same at the end of a long generation as at its start. Views
    handed out before (for an unfinished progress message) do not change: no position before an end is written again.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._room: list[np.ndarray[Any, Any]] = [np.empty(0)] * 3  # tokens, log-probs, versions
        self._filled: int | None = None  # version that the rest of the room is filled with

    def extend(self, tokens: Int32Array, logprobs: Float32Array, version: int) -> None:
        """Append tokens that one version sampled.

        Raises:
            ValueError: not one log-prob per token.
        """
        if len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} tokens but {len(logprobs)} log-probs; a sampler sends one per token")
        answer, start = self._answer, len(self._answer.tokens)
        end = start + len(tokens)
        if not start:  # the whole answer, if nothing is streamed
            answer.tokens, answer.logprobs = tokens, logprobs
            answer.versions = np.full(end, version, answer.versions.dtype)
            return
        if end > len(self._room[0]):
            known = (answer.tokens, answer.logprobs, answer.versions)
            self._room = [np.concatenate([old, np.empty(2 * end - start, old.dtype)]) for old in known]
            self._filled = None
        all_tokens, all_logprobs, all_versions = self._room
        if version != self._filled:
            all_versions[start:], self._filled = version, version
        all_tokens[start:end], all_logprobs[start:end] = tokens, logprobs
        answer.tokens, answer.logprobs, answer.versions = all_tokens[:end], all_logprobs[:end], all_versions[:end]
