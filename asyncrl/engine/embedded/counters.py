"""Counters of the engine, in Prometheus text format."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

from asyncrl.engine.embedded.request import Request

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_WINDOW_S = 1.0


class Histogram:
    """Seconds, in fixed buckets."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(_BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def lines(self, name: str, labels: str) -> list[str]:
        """Prometheus text."""
        total, lines = 0, [f"# TYPE {name} histogram"]
        for edge, count in zip((*_BUCKETS_S, "+Inf"), self.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{edge}"}} {total}')
        return [*lines, f"{name}_sum{{{labels}}} {self.sum_s}", f"{name}_count{{{labels}}} {total}"]


class Counters:
    """Totals since the start."""

    def __init__(self) -> None:
        self.requests = 0
        self.aborted = 0
        self.refused: Counter[int] = Counter()  # by HTTP status
        self.retractions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.weight_load_s = 0.0
        self.first_token = Histogram()
        self.latency = Histogram()
        self.queued = Histogram()
        self._window_start_s = time.perf_counter()
        self._window_tokens = 0
        self._tokens_per_s = 0.0
        self._stepped_s = 0.0

    def stepped(self, tokens: int, started: Iterable[Request]) -> None:
        """One decode step made this many tokens, for the requests in `started` the first."""
        self.generated_tokens += tokens
        self._window_tokens += tokens
        self._stepped_s = now = time.perf_counter()
        for request in started:
            if request.retractions == 0:
                self.first_token.add(now - request.submitted_s)
        if now - self._window_start_s >= _WINDOW_S:
            self._tokens_per_s = self._window_tokens / (now - self._window_start_s)
            self._window_start_s, self._window_tokens = now, 0

    def throughput(self) -> float:
        """Tokens per second over the last whole window; 0 when nothing ran since."""
        return self._tokens_per_s if time.perf_counter() - self._stepped_s < 2 * _WINDOW_S else 0.0

    def ended(self, request: Request) -> None:
        """A request got its last token or was aborted."""
        self.latency.add(time.perf_counter() - request.submitted_s)
        if request.finish is not None and request.finish.type == "abort":
            self.aborted += 1
        if request.admitted_s is not None:
            self.queued.add(request.admitted_s - request.submitted_s)

    def prometheus(self, model_name: str, gauges: Mapping[str, float]) -> str:
        """Prometheus text with SGLang's names; `gauges` are what is true now."""
        labels = f'model_name="{model_name}"'
        lines: list[str] = []
        totals = {
            "num_requests_total": self.requests,
            "num_aborted_requests_total": self.aborted,
            "num_retracted_requests_total": self.retractions,
            "prompt_tokens_total": self.prompt_tokens,
            "cached_tokens_total": self.cached_tokens,
            "generation_tokens_total": self.generated_tokens,
        }
        now = {
            "gen_throughput": self.throughput(),
            "cache_hit_rate": self.cached_tokens / max(self.prompt_tokens, 1),
            "weight_load_duration_seconds": self.weight_load_s,
        }
        for kind, values in (("counter", totals), ("gauge", {**now, **gauges})):
            for name, value in values.items():
                lines += [f"# TYPE sglang:{name} {kind}", f"sglang:{name}{{{labels}}} {value}"]
        name = "asyncrl:num_refused_requests_total"
        lines.append(f"# TYPE {name} counter")
        lines += [f'{name}{{{labels},status="{status}"}} {count}' for status, count in sorted(self.refused.items())]
        lines += self.queued.lines("sglang:queue_time_seconds", labels)
        lines += self.first_token.lines("sglang:time_to_first_token_seconds", labels)
        lines += self.latency.lines("sglang:e2e_request_latency_seconds", labels)
        return "\n".join(lines) + "\n"
