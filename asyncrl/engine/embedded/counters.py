"""Counters of the engine, in Prometheus text format."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from asyncrl.engine.embedded.request import Request

_WINDOW_S = 1.0


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
        self._window_start_s = time.perf_counter()
        self._window_tokens = 0
        self._tokens_per_s = 0.0
        self._stepped_s = 0.0

    def stepped(self, tokens: int) -> None:
        """One decode step made this many tokens."""
        self.generated_tokens += tokens
        self._window_tokens += tokens
        self._stepped_s = now = time.perf_counter()
        if now - self._window_start_s >= _WINDOW_S:
            self._tokens_per_s = self._window_tokens / (now - self._window_start_s)
            self._window_start_s, self._window_tokens = now, 0

    def throughput(self) -> float:
        """Tokens per second over the last whole window; 0 when nothing ran since."""
        return self._tokens_per_s if time.perf_counter() - self._stepped_s < 2 * _WINDOW_S else 0.0

    def ended(self, request: Request) -> None:
        """A request got its last token or was aborted."""
        if request.finish is not None and request.finish.type == "abort":
            self.aborted += 1

    def prometheus(self, model_name: str, gauges: Mapping[str, float]) -> str:
        """Prometheus text with SGLang's names; `gauges` are current values."""
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
        return "\n".join(lines) + "\n"
