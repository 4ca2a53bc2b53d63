"""An engine without a model whose rate follows its load: lognormal lengths, made-up tokens, true versions."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from asyncrl.engine.answer import OnTokens
from asyncrl.engine.client import Chunk, Generation, SamplingParams, VersionSpan
from asyncrl.engine.scripted.rate_curve import RateCurve
from topics.wire import Int32Array

_TICK_S = 0.01
UPDATE_RATE = 2 / 3
"""Rate during an update, as a share of the rate at other times."""


class Lengths(NamedTuple):
    """Lognormal lengths of answers, in tokens."""

    mean: float
    sigma: float

    def draw(self, random_numbers: random.Random, most: int) -> int:
        """Return one length, at least 1 and at most `most`."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return min(most, max(1, round(random_numbers.lognormvariate(mu, self.sigma))))


@dataclass(eq=False)
class _Request:
    begin: float  # tokens that a request had got which runs since the begin of the client
    prompt: int
    tokens: int
    on_tokens: OnTokens | None
    interval: int
    spans: list[VersionSpan] = field(default_factory=list)
    sampled: int = 0
    sent: int = 0
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ScriptedLoadClient:
    """A scripted engine that gives all running requests equal shares of a rate; only this client uses it.

    A request that continues an answer has the tokens that were left of it.
    """

    exact = False
    apart = False

    def __init__(self, curve: RateCurve, lengths: Lengths, *, slots: int, update_s: float) -> None:
        self._curve, self._lengths, self._update_s = curve, lengths, update_s
        self._slots = asyncio.Semaphore(slots)
        self._running: set[_Request] = set()
        self._label = ""
        self._share = 0.0  # tokens that a request has got which runs since the begin
        self._at = 0.0
        self._updating_until = 0.0
        self._clock: asyncio.Task[None] | None = None
        self._prompts: dict[int, int] = {}  # tokens of the prompts of unfinished answers, by seed

    def announced(self, key: str) -> None:
        """From now on tokens come from these weights."""
        self._advance()
        self._updating_until = asyncio.get_running_loop().time() + (self._update_s if self._label else 0.0)
        self._label = key

    async def generate(
        self,
        input_ids: Int32Array,
        sampling: SamplingParams,
        *,
        extra_key: str | None = None,
        on_tokens: OnTokens | None = None,
        stream_interval: int = 16,
        alone: bool = False,
    ) -> Generation:
        """Wait for a slot and for all tokens, then answer."""
        seed = sampling.seed or 0
        begun = len(input_ids) - self._prompts.setdefault(seed, len(input_ids))
        whole = self._lengths.draw(random.Random(seed), begun + sampling.max_new_tokens)
        self._label = self._label or extra_key or ""
        async with self._slots:
            self._advance()
            request = _Request(self._share, len(input_ids), max(1, whole - begun), on_tokens, stream_interval)
            self._running.add(request)
            if self._clock is None or self._clock.done():
                self._clock = asyncio.create_task(self._tick())
            try:
                await request.ended
            finally:
                self._running.discard(request)
        self._prompts.pop(seed, None)
        tokens = np.arange(1, request.tokens + 1, dtype=np.int32) % 32 + 1
        return Generation(
            token_ids=tokens,
            logprobs=np.full(len(tokens), -1.0, np.float32),
            weight_versions=request.spans,
            finish_reason="stop",
        )

    async def health(self) -> bool:
        """Return True: there is no server that could be ill."""
        return True

    async def label(self) -> str:
        """Return the name of the newest weights."""
        return self._label

    async def close(self) -> None:
        """End the clock."""
        if self._clock is not None:
            self._clock.cancel()

    async def _tick(self) -> None:
        while self._running:
            await asyncio.sleep(_TICK_S)
            self._advance()

    def _advance(self) -> None:
        """Give the running requests their tokens up to now."""
        now = asyncio.get_running_loop().time()
        seconds, self._at = now - self._at, now
        count = len(self._running)
        if not count:
            return
        cached = sum(request.prompt + request.sampled for request in self._running)
        rate = self._curve.tokens_per_s(count, cached) * (UPDATE_RATE if now < self._updating_until else 1.0)
        self._share += rate * seconds / count
        for request in list(self._running):
            self._give(request, min(request.tokens, int(self._share - request.begin)))

    def _give(self, request: _Request, sampled: int) -> None:
        if sampled > request.sampled:
            last = request.spans[-1] if request.spans else None
            if last is not None and last.version == self._label:
                request.spans[-1] = VersionSpan(version=last.version, start=last.start, end=sampled)
            else:
                request.spans.append(VersionSpan(version=self._label, start=request.sampled, end=sampled))
            request.sampled = sampled
        over = sampled == request.tokens
        if request.on_tokens is not None and (over or sampled - request.sent >= request.interval):
            self._send(request)
        if over and not request.ended.done():
            request.ended.set_result(None)
            self._running.discard(request)

    def _send(self, request: _Request) -> None:
        """Hand the new tokens on, one chunk per version."""
        assert request.on_tokens is not None
        for span in request.spans:
            begin, end = max(request.sent, span.start), span.end
            if begin < end:
                tokens = np.arange(begin + 1, end + 1, dtype=np.int32) % 32 + 1
                request.on_tokens(Chunk(tokens, np.full(end - begin, -1.0, np.float32), span.version))
        request.sent = request.sampled
