"""One generation across engines: it outlives weight updates, restarts and faults of servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import msgspec
import numpy as np
import structlog

from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.answer import Decode, Likeliest, reach_of, stop_string
from asyncrl.engine.client import Chunk, SamplingParams
from asyncrl.engine.errors import EngineError, EngineOverloaded, EngineRefused, EngineUnavailable, RequestFailed
from asyncrl.engine.fleet import Engine, Fleet, Wanted
from asyncrl.engine.request_options import QUIET_TOKENS, Pace, RequestOptions
from asyncrl.engine.routing import keep_if_there, keep_routing, unrecorded
from asyncrl.engine.token_buffer import TokenBuffer
from topics.actors import Waiting
from topics.engines import version_of
from topics.trajectories import Answer
from topics.wire import Int32Array

TRIES = 4
"""Requests of one generation that may fail, one after another and without a token, before it has failed."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # after a request that brought no token
_ANY = Wanted()

log = structlog.get_logger()


class Watch:
    """Notifications of a running `generate` to its caller; this one ignores all of them."""

    async def before(self, unreported: int) -> None:
        """A request follows; this many tokens may arrive before the first call of `on_tokens`."""

    def waiting(self, waits_for: Waiting) -> AbstractContextManager[None]:
        """A context for the time in which the generation waits for another process."""
        return nullcontext()

    def requested(self, engine_id: str) -> None:
        """A request is made to this engine."""

    def on_tokens(self, tokens: int, discarded: int, lineage: int) -> None:
        """Tokens arrived: the number in the answer, and the number of discarded ones."""

    def on_verified(self, tokens: int, passes: int) -> None:
        """A request with drafted tokens ended: its tokens, and the passes of the model."""

    def on_cached(self, tokens: int) -> None:
        """A request ended: this many tokens of its prompt were in the prefix cache."""

    def on_likeliest(self, likeliest: list[Likeliest]) -> None:
        """The likeliest tokens at the positions of the next `on_tokens`, if requested."""

    def again(self) -> None:
        """The tokens so far are dropped: a request starts from none."""


class Generator:
    """Samples from whichever engine of a fleet is ready, until a generation has ended."""

    def __init__(
        self,
        fleet: Fleet,
        model: ModelInfo,
        decode: Decode,
        *,
        counts: dict[str, float],
        manner: RequestOptions = RequestOptions(),  # noqa: B008 # it cannot be changed
    ) -> None:
        self._seeded = manner.seeded
        self._in_place, self._routed, self._priority = manner.in_place, manner.routed, manner.priority
        self._keep_routing = partial(keep_if_there, count=self._count) if manner.unrouted else keep_routing
        self.quiet_tokens = min(QUIET_TOKENS, manner.portion)  # of a request that need not be streamed
        self.pace = Pace(manner)  # of a streamed one
        self._fleet, self._model = fleet, model
        self._decode = decode  # tokens to text, special tokens included
        self._counts = counts  # gets the counters of what went wrong

    async def generate(
        self,
        ids: Int32Array,
        sampling: SamplingParams,
        *,
        wanted: Wanted = _ANY,
        answer: Answer | None = None,
        watch: Watch | None = None,
    ) -> Answer:
        """Sample the answer to a prompt, and return it when it is done.

        At the end of the context it ends as if it had reached its limit.

        Args:
            ids: [P] the prompt.
            sampling: of the whole answer.
            wanted: the engine that may sample it.
            answer: an open one, which is continued from the tokens that it has; None for a new one.
            watch: is notified of the progress.

        Raises:
            EngineRefused: the prompt cannot be sampled from, or requests failed `TRIES` times in a row.
            VersionAbsent: an exact version is wanted, and no engine has it any more.
        """
        self._check(ids)
        answer = Answer("generate", "", done=False) if answer is None else answer
        watch, faults = watch or Watch(), _Faults()
        while (budget := self._budget(ids, answer, sampling)) > 0:
            await watch.before(min(budget, self.quiet_tokens))
            if (engine := self._fleet.take(wanted, avoid=faults.engines)) is None:
                with watch.waiting(Waiting("version", version=wanted.version)):
                    engine = await self._fleet.choose(wanted, avoid=faults.engines)
            had = len(answer.tokens)
            try:
                faults.check()
                rest = msgspec.structs.replace(
                    sampling,
                    max_new_tokens=budget,
                    seed=sampling.seed if self._seeded or not engine.client.exact else None,
                    group=wanted.group,
                    routed=unrecorded(answer, len(ids) + had) if self._routed else None,
                    priority=self._priority,
                )
                finish = await self._request(engine, ids, answer, rest, faults, watch)
            finally:
                self._fleet.release(engine)
            if finish != "abort":
                answer.done, answer.finish = True, finish
                return answer
            self._count("resumed")
            if fruitful := len(answer.tokens) > had:
                engine.doubts = 0
            if sampling.schema:
                _begin_anew(answer, watch)
            if pause_s := faults.pause_s(fruitful=fruitful):
                with watch.waiting(Waiting("retry", engine.engine_id, fault=faults.words or "an answer with no token")):
                    await asyncio.sleep(pause_s)
        answer.done, answer.finish = True, "length"
        return answer

    def _check(self, ids: Int32Array) -> None:
        """Refuse prompts that no engine can take; a token outside the vocabulary would end some servers."""
        context, vocabulary = self._model.context, self._model.vocab_size
        if not 0 < len(ids) < context:
            raise EngineRefused(f"the prompt has {len(ids)} tokens; a context of {context} takes 1 to {context - 1}")
        if np.maximum.reduce(ids.view(np.uint32)) >= vocabulary:  # one pass: a negative id is a large one there
            wrong = ids[(ids < 0) | (ids >= vocabulary)][0]
            raise EngineRefused(f"the prompt has the token id {wrong}, outside of the vocabulary of {vocabulary}")

    def _budget(self, ids: Int32Array, answer: Answer, sampling: SamplingParams) -> int:
        """Tokens that may still come: SGLang refuses a request that could exceed the context."""
        return min(sampling.max_new_tokens, self._model.context - len(ids)) - len(answer.tokens)

    async def _request(
        self, engine: Engine, ids: Int32Array, answer: Answer, sampling: SamplingParams, faults: _Faults, watch: Watch
    ) -> str:
        """Send one request to one engine; returns its end: "stop", "length", or "abort" to continue from its tokens."""
        assert engine.ready is not None
        key, messages = engine.ready.key, engine.messages
        labels = _Labels(key if engine.client.exact else "", in_place=self._in_place)
        if engine.client.apart:
            labels.stands = lambda: engine.messages == messages or engine.has(key)
        had = len(answer.tokens)
        intake = _Intake(answer, labels, sampling.stop, self._decode, watch)
        if engine.client.exact:  # a scripted engine has no model, and no limit
            intake.vocabulary, intake.most = self._model.vocab_size, had + sampling.max_new_tokens
        # Without a stream an answer has one label, that of its end.
        streamed = self._in_place or sampling.max_new_tokens > self.quiet_tokens
        watch.requested(engine.engine_id)
        began = time.monotonic()
        try:
            generation = await engine.client.generate(
                np.concatenate([ids, answer.tokens]) if len(answer.tokens) else ids,
                msgspec.structs.replace(sampling, adapter=engine.ready.adapter),
                extra_key=engine.ready.cache_key,
                on_tokens=intake.on_tokens if streamed else None,
                stream_interval=self.pace.tokens(sampling.max_new_tokens),
                alone=faults.any,
            )
            if not streamed:
                for span in generation.weight_versions:
                    part = slice(span.start, span.end)
                    likeliest = generation.likeliest[part]
                    intake.on_tokens(
                        Chunk(generation.token_ids[part], generation.logprobs[part], span.version, likeliest=likeliest)
                    )
        except (EngineUnavailable, RequestFailed, EngineOverloaded) as error:
            self._failed(engine, error, faults, messages)
            return "abort"
        if streamed:
            self.pace.generated(len(generation.token_ids), time.monotonic() - began)
        watch.on_cached(generation.cached)
        if generation.passes:
            watch.on_verified(len(generation.token_ids), generation.passes)
        # Rows of other weights, or of a request that ended before it was read, would keep out those of the next one.
        complete = generation.finish_reason != "abort" or (generation.routed is not None and len(generation.token_ids))
        if self._routed and complete and not labels.wrong and not intake.cut:
            self._keep_routing(answer, generation, prompt=len(ids), had=had, model=self._model)
        if labels.wrong:
            self._count("mislabelled_tokens", intake.refused)
            if engine.messages == messages:  # otherwise the request was only late for an update
                words = f"{engine.engine_id} sampled with weights {labels.wrong[:80]!r}, expected {key!r}"
                faults.add(words, engine, its=True, messages=messages)
                self._fleet.suspect(engine, mislabelled=True)
        if labels.wrong and not intake.stopped:
            return "abort"
        return "stop" if intake.stopped else "length" if intake.cut else generation.finish_reason

    def _failed(self, engine: Engine, error: EngineError, faults: _Faults, messages: int) -> None:
        """Distinguish a request that failed by itself from an engine that is overloaded, not well, or gone.

        A stream that breaks after an update (its `messages` grew) is no sign of a dead engine: SGLang ends some with
        pending tokens.
        """
        log.warning("request failed", engine=engine.engine_id, reason=str(error))
        if isinstance(error, EngineUnavailable):
            updated = engine.messages != messages
            self._count("broken_by_update" if updated else "engine_unavailable")
            faults.add(str(error), engine, its=True, messages=messages if updated else None)
            (self._fleet.check if updated else self._fleet.suspect)(engine)
            return
        if isinstance(error, EngineOverloaded):
            self._count("engine_overloaded")
            faults.words = str(error)
        else:
            self._count("request_failed")
            faults.add(f"{engine.engine_id}: {error}", engine)
        self._fleet.check(engine)

    def _count(self, name: str, by: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + by


def _begin_anew(answer: Answer, watch: Watch) -> None:
    """Drop the tokens so far: a server begins its grammar with the first token of a request."""
    if len(answer.tokens):
        answer.tokens, answer.logprobs, answer.versions = answer.tokens[:0], answer.logprobs[:0], answer.versions[:0]
        watch.again()


class _Faults:
    """The faults of a generation since its last token."""

    def __init__(self) -> None:
        self.words = ""  # of the newest
        self.engines: set[Engine] = set()  # that were asked
        self._met: list[tuple[Engine | None, int | None]] = []
        self._pauses = 0

    @property
    def any(self) -> bool:
        """Return whether there was one."""
        return bool(self._met)

    def add(self, words: str, engine: Engine, *, its: bool = False, messages: int | None = None) -> None:
        """Note a fault.

        Args:
            engine: the one that was asked.
            its: whether the engine is at fault, unless it turns out to be healthy.
            messages: it had published when it was asked, where the news of an update would explain the fault.
        """
        self.words = words
        self.engines.add(engine)
        self._met.append((engine if its else None, messages))

    def check(self) -> None:
        """Refuse to continue after `TRIES` failures that were no engine's fault.

        Raises:
            EngineRefused: with the text of the newest refusal.
        """
        tries = sum(
            engine is None or (engine.ready is not None and messages in (None, engine.messages))
            for engine, messages in self._met
        )
        if tries >= TRIES:
            raise EngineRefused(f"{tries} requests failed without a token between them, the last: {self.words}")

    def pause_s(self, *, fruitful: bool) -> float:
        """Seconds to wait before the next request; none after one with tokens, or one that an update sent back."""
        if fruitful:
            self._met.clear()
            self.engines.clear()
            self._pauses, self.words = 0, ""
            return 0.0
        self._pauses += 1
        if self._pauses == 1 and not self.words:
            return 0.0
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * float(2 ** min(self._pauses - 1, 10)))


class _Labels:
    """The weights that the tokens of one request come from."""

    def __init__(self, key: str, *, in_place: bool) -> None:
        self.wrong = ""  # label of tokens from other weights: no version can vouch for them
        self.changed = False  # newer weights continued the request
        self.stands: Callable[[], bool] | None = None  # whether the prompt's weights are those of its first token
        self._key = key  # of the weights that are asked for; "" for any
        self._in_place = in_place  # newer ones of their lineage may follow

    def read(self, chunk: Chunk) -> str:
        """Return the key of the weights that new tokens come from; "" for wrong ones."""
        label, before = chunk.weight_version, self._key
        stands, self.stands = self.stands, None
        if stands is not None and not stands():
            self.wrong = "that may have changed before the first token"
            return ""
        if not before or label == before:
            return label
        if not (self._in_place and _follows(label, before)):
            self.wrong = label
            return ""
        self._key, self.changed = label, True
        # What came with one label may have been sampled before the update: then its lag is that of the older weights.
        return label if chunk.reported else before


def _follows(label: str, key: str) -> bool:
    """Return whether these are newer weights of the same lineage."""
    try:
        lineage, version = version_of(label)
    except ValueError:
        return False
    known, before = version_of(key)
    return lineage == known and version > before


class _Intake:
    """Takes tokens over into an answer, up to one from other weights than asked for, or to the end of a stop string."""

    vocabulary = 0  # ids of the model's tokens are below this; 0: any are taken
    most = 2**31  # tokens of the whole answer

    def __init__(self, answer: Answer, labels: _Labels, stop: list[str], decode: Decode, watch: Watch) -> None:
        self.refused = 0  # tokens from other weights
        self.stopped = False  # a stop string is complete
        self.cut = False  # more came than was asked for
        self._answer = answer
        self._labels = labels
        self._stop = stop
        self._decode = decode
        self._watch = watch
        self._tape = TokenBuffer(answer)
        # The engine looks for stop strings in the tokens of its own request; this code finds strings that straddle two
        # requests.
        self._seam_end = len(answer.tokens) + reach_of(stop) if stop and len(answer.tokens) else 0

    def on_tokens(self, chunk: Chunk) -> bool:
        """Take over a chunk; False if it, or its successors, are not wanted.

        Raises:
            RequestFailed: the model has no such token.
        """
        tokens, label = chunk.token_ids, self._labels.read(chunk)
        came = len(tokens)
        # Of the few tokens of an event, Python's list is faster than numpy.
        if self.vocabulary and came and (greatest := max(tokens.tolist())) >= self.vocabulary:
            raise RequestFailed(f"token {greatest} came, outside of the vocabulary of {self.vocabulary}")
        if self._labels.wrong:
            self.refused += came
        if self._labels.wrong or self.stopped:
            self._watch.on_tokens(0, came, -1)
            return False
        lineage, version = version_of(label)
        if (wanted := self._wanted(tokens, came)) == came:
            self._tape.extend(tokens, chunk.logprobs, version)
        else:
            self._tape.extend(tokens[:wanted], chunk.logprobs[:wanted], version)
        if self._labels.changed:
            self._answer.hybrid = True
        if chunk.likeliest:
            self._watch.on_likeliest(chunk.likeliest[:wanted])
        self._watch.on_tokens(wanted, came - wanted, lineage)
        return not (self.stopped or self.cut)

    def _wanted(self, tokens: Int32Array, came: int) -> int:
        """Return how many of the new tokens belong to the answer: those up to the one that completes a stop string."""
        had = len(self._answer.tokens)
        if had < self._seam_end:
            known = self._answer.tokens.tolist() + tokens.tolist()
            for end in range(had + 1, min(len(known), self._seam_end) + 1):
                if stop_string(known[:end], self._stop, self._decode):
                    self.stopped = True
                    return end - had
        if had + came <= self.most:
            return came
        self.cut = True
        return self.most - had
