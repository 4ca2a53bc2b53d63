"""An engine without a model, for benchmarks: lognormal durations, made-up tokens, true versions."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path

import numpy as np
import xxhash

from asyncrl.config.engine_settings import EngineSettings
from asyncrl.engine.answer import OnTokens
from asyncrl.engine.client import Chunk, Generation, SamplingParams, VersionSpan
from asyncrl.engine.scripted.load_client import Lengths, ScriptedLoadClient
from asyncrl.engine.scripted.rate_curve import RateCurve
from topics.wire import Int32Array


def scripted_duration(input_ids: Int32Array, seed: int, *, mean_s: float, sigma: float) -> float:
    """Seconds of one scripted generation: lognormal with this mean, drawn by the hash of its prompt and seed."""
    if mean_s == 0:
        return 0.0
    drawn = random.Random(xxhash.xxh3_64_intdigest(input_ids.tobytes(), seed & 0xFFFFFFFF))
    return drawn.lognormvariate(math.log(mean_s) - sigma * sigma / 2, sigma)


_BEAT_S = 5.0  # a long generation shows that it advances


class ScriptedClient:
    """A scripted engine: takes a drawn time; each token carries the version current at its share of it."""

    exact = False
    apart = False

    def __init__(self, *, mean_s: float, sigma: float, tokens: int, slots: int) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._mean_s = mean_s
        self._sigma = sigma
        self._tokens = np.arange(1, tokens + 1, dtype=np.int32)
        self._logprobs = np.full(tokens, -1.0, np.float32)
        self._changes: list[tuple[float, str]] = []  # when which version became current

    def announced(self, key: str) -> None:
        """From now on tokens come from these weights."""
        self._changes.append((asyncio.get_running_loop().time(), key))

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
        """Wait for a slot and for the scripted duration, then answer."""
        loop = asyncio.get_running_loop()
        duration = scripted_duration(input_ids, sampling.seed or 0, mean_s=self._mean_s, sigma=self._sigma)
        beats = 1
        if on_tokens is not None and duration:
            beats = max(math.ceil(duration / _BEAT_S), math.ceil(len(self._tokens) / stream_interval))
        sent = 0
        async with self._slots:
            start = loop.time()
            for beat in range(1, beats + 1):
                if duration:
                    await asyncio.sleep(start + duration * beat / beats - loop.time())
                spans = self._spans(start, duration, extra_key or "")
                sent = self._send(spans, sent, math.floor(len(self._tokens) * beat / beats), on_tokens)
        return Generation(token_ids=self._tokens, logprobs=self._logprobs, weight_versions=spans, finish_reason="stop")

    def _send(self, spans: list[VersionSpan], sent: int, until: int, on_tokens: OnTokens | None) -> int:
        """Hand on the tokens from `sent` to `until`, one chunk per version."""
        for span in spans:
            part = slice(max(sent, span.start), min(until, span.end))
            if on_tokens is not None and part.start < part.stop:
                on_tokens(Chunk(self._tokens[part], self._logprobs[part], span.version))
        return until

    async def health(self) -> bool:
        """Return True: there is no server that could be ill."""
        return True

    async def label(self) -> str:
        """Return the name of the newest weights."""
        return self._changes[-1][1] if self._changes else ""

    async def close(self) -> None:
        """Nothing to close."""

    def _spans(self, start: float, duration: float, key: str) -> list[VersionSpan]:
        count = len(self._tokens)
        spans = [VersionSpan(version=key, start=0, end=count)]
        for at, version in self._changes:
            done = math.ceil((at - start) / duration * count) if duration else 0
            if 0 < done < count and version != spans[-1].version:
                spans[-1] = VersionSpan(version=spans[-1].version, start=spans[-1].start, end=done)
                spans.append(VersionSpan(version=version, start=done, end=count))
        return spans


def open_client(settings: EngineSettings, _address: str, _key_file: Path | None) -> ScriptedClient | ScriptedLoadClient:
    """A client by the settings of its durations or its rate."""
    if settings.scripted_curve:
        lengths = Lengths(settings.scripted_tokens, settings.scripted_sigma)
        curve, update_s = RateCurve(*settings.scripted_curve), settings.scripted_update_s
        return ScriptedLoadClient(curve, lengths, slots=settings.max_running, update_s=update_s)
    mean_s, sigma, tokens = settings.scripted_mean_s, settings.scripted_sigma, settings.scripted_tokens
    return ScriptedClient(mean_s=mean_s, sigma=sigma, tokens=tokens, slots=settings.max_running)
