"""A judge that is the run's own model, on the run's engines, with the weights that they have or one version alone."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import numpy as np

from asyncrl.chat_endpoint import AskFailed
from asyncrl.config.live_settings import JudgeKind
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.engine.client import SamplingParams
from asyncrl.engine.errors import EngineError
from asyncrl.engine.fleet import Wanted
from asyncrl.engine.generator import Generator
from asyncrl.judges.protocol import Case, JudgeParts, Vote, VoteFailed
from asyncrl.judges.quoting import question_of, read_vote


class EngineAsk:
    """Samples the answer to a question as replies are sampled: it continues after an update or the death of an engine.

    Args of a call are messages with role and content.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: TaskTokenizer,
        *,
        deadline_s: float,
        temperature: float,
        most_tokens: int,
        version: int | None = None,
    ) -> None:
        self._wanted = Wanted() if version is None else Wanted(version, exact=True)  # None: whichever an engine has
        self._generator = generator
        self._tokenizer = tokenizer
        self._deadline_s = deadline_s
        self._sampling = SamplingParams(
            max_new_tokens=most_tokens, temperature=temperature, stop_token_ids=tokenizer.stop_ids
        )

    async def __call__(self, messages: list[dict[str, Any]]) -> str:
        """Return the answer of the model.

        Raises:
            AskFailed: there is none.
        """
        try:
            prompt = self._tokenizer.encode(self._tokenizer.chat_text(messages))
            async with asyncio.timeout(self._deadline_s):
                answer = await self._generator.generate(prompt, self._sampling, wanted=self._wanted)
        except TimeoutError as error:
            raise AskFailed(f"no answer of an engine within {self._deadline_s:g} s", "") from error
        except (TokenizerError, EngineError) as error:
            raise AskFailed(type(error).__name__, f": {error}") from error
        return str(self._tokenizer.decode(np.asarray(answer.tokens)))


class EngineJudge:
    """Votes by asking the run's own model."""

    def __init__(self, ask: EngineAsk, special: Collection[str], *, version: int | None = None) -> None:
        self.name = "engine" if version is None else f"engine:{version}"
        self._ask, self._special = ask, special

    async def vote(self, case: Case) -> Vote:
        """Ask the model; without evidence there is nothing to ask about."""
        question = question_of(case, special=self._special)
        try:
            return read_vote(await self._ask(question.messages), question.mark)
        except AskFailed as error:
            raise VoteFailed(error.reason, error.detail) from error

    async def close(self) -> None:
        """The engines belong to the run."""


async def open_judge(parts: JudgeParts) -> EngineJudge:
    """Open the engines that vote; those of `live.judge.engines` have the first version of the run."""
    settings = parts.settings
    version = parts.first_version if settings.engines else None
    ask = EngineAsk(
        await parts.open_generator(),
        parts.tokenizer,
        deadline_s=settings.deadline_s,
        temperature=settings.temperature,
        most_tokens=settings.max_new_tokens,
        version=version,
    )
    return EngineJudge(ask, parts.tokenizer.special, version=version)


class Engine(JudgeKind):
    """The run's own model on the run's engines."""

    keys = ("engines", "temperature", "max_new_tokens")
    opener = "asyncrl.judges.engine:open_judge"


KIND = Engine()
