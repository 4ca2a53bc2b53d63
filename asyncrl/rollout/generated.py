"""Generations of a rollout function, and their results."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from asyncrl.data.tokenizer import TaskTokenizer
from topics.trajectories import Answer
from topics.wire import Int32Array


class Generated:
    """The result of one `generate`."""

    def __init__(self, answer: Answer, tokenizer: TaskTokenizer, text: str | None = None) -> None:
        self._answer, self._tokenizer = answer, tokenizer
        self._text = text  # None: the tokenizer decodes it

    @property
    def tokens(self) -> Int32Array:
        """[T] sampled tokens."""
        return self._answer.tokens

    @property
    def finish(self) -> str:
        """Return how it ended: "stop" or "length"."""
        return self._answer.finish

    @cached_property
    def text(self) -> str:
        """The tokens as text, without those that end a turn; see `rollout.skip_special_tokens`."""
        return self._tokenizer.decode(self.tokens) if self._text is None else self._text


class Generation(NamedTuple):
    """A generation that was asked for."""

    ids: Int32Array
    answer: Answer
    generated: Generated
