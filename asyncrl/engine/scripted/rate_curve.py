"""The rate of an inference server by its load."""

from __future__ import annotations

from typing import NamedTuple


class RateCurve(NamedTuple):
    """Seconds of one decoding step, in which each running request gets one token.

    A step takes `base_s + request_s * n + cache_s * n * k`, with n running requests and k cached tokens.
    """

    base_s: float
    request_s: float
    cache_s: float

    def tokens_per_s(self, running: int, cached: float) -> float:
        """Return the tokens per second of all running requests together."""
        step_s = self.base_s + self.request_s * running + self.cache_s * running * cached
        return running / step_s if step_s else 0.0

    def faster(self, times: float) -> RateCurve:
        """Return the curve of a server that is so many times as fast."""
        return RateCurve(*(seconds / times for seconds in self))


SGLANG_0_6B = RateCurve(2.9e-3, 1.0e-5, 2.0e-10)
"""Fitted to SGLang 0.5.17 with Qwen3-0.6B on one H200, triton attention.

Measured tokens/s at (running requests, cached tokens), and those of the curve: 26,000 and 26,000 at (256, 85,000);
20,000 and 17,700 at (256, 175,000); 15,000 and 15,000 at (256, 225,000); 13,500 and 13,600 at (109, 185,000); 3,300 and
3,300 at (10, 10,000).
"""
