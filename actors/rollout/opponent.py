"""Answers of a frozen model: an opponent, or a simulated user, on engines that keep the first version of the run."""

from __future__ import annotations

from contextlib import AsyncExitStack

import numpy as np

from actors.runtime.actor import Context
from actors.runtime.judging_engines import open_generator
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.client import SamplingParams
from asyncrl.engine.fleet import Wanted
from asyncrl.engine.generator import Generator
from asyncrl.errors import FunctionError
from asyncrl.rollout.host import Limits


class Opponent:
    """Samples from the engines of `rollout.opponent_engines`."""

    def __init__(self, context: Context, tokenizer: TaskTokenizer) -> None:
        self._context, self._tokenizer = context, tokenizer
        self._wanted = Wanted(context.config.start.step, exact=True)
        self._generator: Generator | None = None

    async def open(self, stack: AsyncExitStack) -> None:
        """Follow the engines, if a group is named; the stack closes them."""
        if self._context.config.rollout.opponent_engines:
            opened = await open_generator(self._context, self._tokenizer, stack, purpose="opponents")
            self._generator = opened

    async def sample(self, input_ids: list[int], limits: Limits, temperature: float) -> tuple[list[int], str]:
        """Return the tokens of an answer, and how it ended.

        Raises:
            FunctionError: no group is named.
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
        answer = await self._generator.generate(np.array(input_ids, np.int32), sampling, wanted=self._wanted)
        return answer.tokens.tolist(), answer.finish
