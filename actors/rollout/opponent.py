"""Answers of a second model, an opponent or a simulated user: the first version of the run, or another model."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import cast

import numpy as np

from actors.runtime.actor import Context
from actors.runtime.judging_engines import open_generator, tokenizer_of
from asyncrl.config.pools import model_of, version_of
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.client import SamplingParams
from asyncrl.engine.fleet import Wanted
from asyncrl.engine.generator import Generator
from asyncrl.errors import FunctionError
from asyncrl.rollout.host import Asked, Limits
from topics.prompts import PromptRow


class Opponent:
    """Samples from the engines of `rollout.opponent_engines`."""

    def __init__(self, context: Context, tokenizer: TaskTokenizer) -> None:
        self._context, self._tokenizer = context, tokenizer
        if model_of(context.config, "opponents"):
            self._tokenizer = tokenizer_of(context, "opponents")
        self._wanted = Wanted(version_of(context.config, "opponents"), exact=True)
        self._generator: Generator | None = None

    async def open(self, stack: AsyncExitStack) -> None:
        """Follow the engines, if a group is named; the stack closes them."""
        if self._context.config.rollout.opponent_engines:
            opened = await open_generator(self._context, self._tokenizer, stack, purpose="opponents")
            self._generator = opened

    async def sample(self, asked: Asked, limits: Limits, temperature: float) -> tuple[list[int], str, str]:
        """Return the tokens of an answer, how it ended, and its text.

        Args:
            asked: text or chat messages, or token ids of the model that answers.

        Raises:
            FunctionError: no group is named.
            TokenizerError: that model cannot encode the text, or has no chat template.
        """
        if self._generator is None:
            raise FunctionError("rollout.opponent_engines names no group of engines that could answer")
        sampling = SamplingParams(
            max_new_tokens=limits.max_new_tokens,
            temperature=temperature,
            stop=limits.stop,
            stop_token_ids=self._tokenizer.stop_ids,
            seed=limits.seed,
        )
        answer = await self._generator.generate(self._tokens(asked), sampling, wanted=self._wanted)
        return answer.tokens.tolist(), answer.finish, self._tokenizer.decode(answer.tokens)

    def _tokens(self, asked: Asked) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        if isinstance(asked, str) or (asked and isinstance(asked[0], dict)):
            row = PromptRow(cast(str | list[dict[str, object]], asked))
            return self._tokenizer.encode_prompt(row, max_tokens=None)
        return np.array(asked, np.int32)
