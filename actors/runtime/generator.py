"""One generation across engines: it outlives weight updates, restarts and faults of servers."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext

import msgspec
import numpy as np

from actors.runtime.actor import Context
from actors.runtime.engine_pool import Engine, EnginePool, version_of
from asyncrl.config.settings import EngineSettings
from asyncrl.data.model_dir import ModelInfo
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.client import Chunk, SamplingParams
from asyncrl.engine.errors import EngineOverloaded, EngineRefused, EngineUnavailable, RequestFailed
from asyncrl.engine.stops import reach_of, stop_string
from asyncrl.rollout.journal import Tape
from topics.trajectories import Answer
from topics.wire import Float32Array, Int32Array

TRIES = 4
"""Requests of one generation that may fail, one after another and without a token, before it has failed."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # after a request that brought no token
_QUIET_TOKENS = 64  # longer generations are streamed, so that one sees them advance
_STREAM_INTERVAL = 16


def as_served(model: ModelInfo, settings: EngineSettings) -> ModelInfo:
    """A model as the run's engines serve it."""
    return model._replace(context=settings.context or model.context)


class Asker:
    """The requester of a generation, notified of its progress. This one ignores it."""

    chunk_tokens = _STREAM_INTERVAL  # of a streamed generation come at a time
    quiet_tokens = _QUIET_TOKENS  # of a request that need not be streamed

    async def prepare(self, budget: int) -> None:
        """Do what must be done before a request for so many tokens."""

    def waiting(self, place: str) -> AbstractContextManager[None]:
        """A context for the time in which the generation waits for another process."""
        return nullcontext()

    def requested(self, engine_id: str, budget: int) -> None:
        """A request for so many tokens is made."""

    def sampled(self, tokens: int, lineage: int) -> None:
        """New tokens came, from weights of this lineage."""

    def discarded(self, tokens: int) -> None:
        """Tokens came that belong to no answer."""

    def streamed(self) -> None:
        """A chunk was taken in, and more may follow."""

    def ended(self, rest: int) -> None:
        """The request is over; so many of its tokens did not come."""


class Generator:
    """Samples from whichever engine is ready, until a generation has ended."""

    def __init__(
        self, context: Context, pool: EnginePool, tokenizer: TaskTokenizer, model: ModelInfo, asker: Asker
    ) -> None:
        self._context = context
        self._pool = pool
        self._tokenizer = tokenizer
        self._model = model
        self._asker = asker

    async def extend(self, ids: Int32Array, answer: Answer, sampling: SamplingParams, min_version: int) -> None:
        """Extend an open answer to a prompt until it is done.

        It continues from the tokens that the answer has. At the end of the context it ends as if it had reached its
        limit.

        Args:
            sampling: of the whole answer.
            min_version: of the weights that may sample it.

        Raises:
            EngineRefused: the prompt cannot be sampled from, or requests failed `TRIES` times in a row.
        """
        self._check(ids)
        faults = _Faults()
        while (budget := self._budget(ids, answer, sampling)) > 0:
            await self._asker.prepare(budget)
            with self._asker.waiting(f"an engine with version {min_version}"):
                engine = await self._pool.choose(min_version)
            had = len(answer.tokens)
            try:
                faults.check()
                finish = await self._request(engine, ids, answer, sampling, faults)
            finally:
                self._pool.release(engine)
            if finish != "abort":
                answer.done, answer.finish = True, finish
                return
            self._context.count("resumed")
            if fruitful := len(answer.tokens) > had:
                engine.doubts = 0
            if pause_s := faults.pause_s(fruitful=fruitful):
                with self._asker.waiting(f"{engine.engine_id} after {faults.words or 'an answer without a token'}"):
                    await asyncio.sleep(pause_s)
        answer.done, answer.finish = True, "length"

    def _check(self, ids: Int32Array) -> None:
        """Refuse what no engine can sample from; a token outside of the vocabulary would end some servers."""
        context, vocabulary = self._model.context, self._model.vocab_size
        if not 0 < len(ids) < context:
            raise EngineRefused(f"the prompt has {len(ids)} tokens; a context of {context} takes 1 to {context - 1}")
        if ids.view(np.uint32).max() >= vocabulary:  # one pass: a negative id is a large one there
            wrong = ids[(ids < 0) | (ids >= vocabulary)][0]
            raise EngineRefused(f"the prompt has the token id {wrong}, outside of the vocabulary of {vocabulary}")

    def _budget(self, ids: Int32Array, answer: Answer, sampling: SamplingParams) -> int:
        """Tokens that may still come: SGLang refuses a request that could exceed the context."""
        return min(sampling.max_new_tokens, self._model.context - len(ids)) - len(answer.tokens)

    async def _request(
        self, engine: Engine, ids: Int32Array, answer: Answer, sampling: SamplingParams, faults: _Faults
    ) -> str:
        """One request to one engine; returns how it ended: "stop", "length", or "abort" to go on from what came."""
        assert engine.ready is not None
        ready, asker = engine.ready, self._asker
        budget, had = self._budget(ids, answer, sampling), len(answer.tokens)
        seed = sampling.seed if engine.scripted else None
        sampling = msgspec.structs.replace(sampling, max_new_tokens=budget, seed=seed)
        intake = _Intake(answer, ready.key if engine.exact else "", sampling.stop, self._tokenizer, asker)
        streamed = budget > asker.quiet_tokens
        asker.requested(engine.engine_id, budget)
        try:
            generation = await engine.client.generate(
                np.concatenate([ids, answer.tokens]) if had else ids,
                sampling,
                extra_key=ready.key,
                on_tokens=intake.on_tokens if streamed else None,
                stream_interval=asker.chunk_tokens,
                alone=faults.any,
            )
            if not streamed:
                for span in generation.weight_versions:
                    part = slice(span.start, span.end)
                    intake.take(generation.token_ids[part], generation.logprobs[part], span.version)
        except EngineUnavailable as error:
            self._context.count("engine_unavailable")
            self._context.log.warning("engine unavailable", engine=engine.engine_id, reason=str(error))
            faults.add(str(error), engine)
            self._pool.suspect(engine)
            return "abort"
        except (RequestFailed, EngineOverloaded) as error:
            self._failed(engine, error, faults)
            return "abort"
        finally:
            asker.discarded(intake.discarded)
            asker.ended(budget - (len(answer.tokens) - had))
        if intake.wrong:
            faults.add(f"{engine.engine_id} sampled with weights {intake.wrong!r}, expected {ready.key!r}", engine)
            self._context.count("mislabelled_tokens", intake.refused)
            self._pool.mislabelled(engine, intake.wrong)
        return "stop" if intake.stopped else "abort" if intake.wrong else generation.finish_reason

    def _failed(self, engine: Engine, error: RequestFailed | EngineOverloaded, faults: _Faults) -> None:
        """The engine answered, and could not do it: is it well itself?"""
        overloaded = isinstance(error, EngineOverloaded)
        self._context.count("engine_overloaded" if overloaded else "request_failed")
        self._context.log.warning("request failed", engine=engine.engine_id, reason=str(error))
        if overloaded:
            faults.words = str(error)
        else:
            faults.add(f"{engine.engine_id}: {error}")
        self._pool.check(engine)


class _Faults:
    """The faults of a generation since its last token."""

    def __init__(self) -> None:
        self.words = ""  # of the newest
        self._met: list[Engine | None] = []
        self._pauses = 0

    @property
    def any(self) -> bool:
        """Return whether there was one."""
        return bool(self._met)

    def add(self, words: str, engine: Engine | None = None) -> None:
        """Note a fault.

        Args:
            engine: the one at fault, unless it turns out to be healthy.
        """
        self.words = words
        self._met.append(engine)

    def check(self) -> None:
        """Refuse to go on after `TRIES` of them that were no engine's fault.

        Raises:
            EngineRefused: with the text of the newest refusal.
        """
        tries = sum(engine is None or engine.ready is not None for engine in self._met)
        if tries >= TRIES:
            raise EngineRefused(f"{tries} requests failed without a token between them, the last: {self.words}")

    def pause_s(self, *, fruitful: bool) -> float:
        """Seconds to wait before the next request; none after one that brought tokens, or was merely sent back."""
        if fruitful:
            self._met.clear()
            self._pauses, self.words = 0, ""
            return 0.0
        self._pauses += 1
        if self._pauses == 1 and not self.words:
            return 0.0
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * float(2 ** min(self._pauses - 1, 10)))


class _Intake:
    """Takes tokens over into an answer, up to one from other weights than asked for, or to the end of a stop string."""

    def __init__(self, answer: Answer, key: str, stop: list[str], tokenizer: TaskTokenizer, asker: Asker) -> None:
        """
        Args:
            key: of the weights that the tokens must come from; "" for any.
        """
        self.wrong = ""  # label of tokens from other weights: no version can vouch for them
        self.refused = 0  # such tokens
        self.discarded = 0  # tokens that were not taken over, these among them
        self.stopped = False  # a stop string is complete
        self._answer = answer
        self._key = key
        self._stop = stop
        self._tokenizer = tokenizer
        self._asker = asker
        self._tape = Tape(answer)
        # The engine looks for stop strings in the tokens of its own request; those across the seam are looked for here.
        self._seam_end = len(answer.tokens) + reach_of(stop) if stop and len(answer.tokens) else 0

    def on_tokens(self, chunk: Chunk) -> bool:
        """Take a chunk over; False where it, or what follows, is not wanted."""
        if not self.take(chunk.token_ids, chunk.logprobs, chunk.weight_version):
            return False
        self._asker.streamed()
        return True

    def take(self, tokens: Int32Array, logprobs: Float32Array, label: str) -> bool:
        """Take tokens over; False when the generation must end."""
        if self._key and label != self._key:
            self.wrong = label
            self.refused += len(tokens)
        if self.wrong or self.stopped:
            self.discarded += len(tokens)
            return False
        wanted = self._wanted(tokens)
        lineage, version = version_of(label)
        self._tape.extend(tokens[:wanted], logprobs[:wanted], version)
        self._asker.sampled(wanted, lineage)
        self.discarded += len(tokens) - wanted
        return not self.stopped

    def _wanted(self, tokens: Int32Array) -> int:
        """Return how many of the new tokens belong to the answer: those up to the one that completes a stop string."""
        had = len(self._answer.tokens)
        if had < self._seam_end:
            known = self._answer.tokens.tolist() + tokens.tolist()
            for end in range(had + 1, min(len(known), self._seam_end) + 1):
                if stop_string(known[:end], self._stop, self._tokenizer.decode_all):
                    self.stopped = True
                    return end - had
        return len(tokens)
