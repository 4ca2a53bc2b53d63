"""The load of a server, as it reports it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class EngineLoad(NamedTuple):
    """The load of a server; `tokens` grows while anything runs."""

    requests: int  # running and waiting
    tokens: int  # in the caches of running requests
    cache_share: float | None = None  # fill level of the caches, 0 to 1
    hit_share: float | None = None  # of the tokens of prompts, those found in a cache, 0 to 1


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    token_usage: float | None = None
    cache_hit_rate: float | None = None


class ServerLoads(msgspec.Struct):
    """The answer to `GET /v1/loads`: a load for each scheduler of the server."""

    loads: list[_Load] = []

    @property
    def sum(self) -> EngineLoad:
        """Return the load of the whole server."""
        return EngineLoad(
            sum(load.num_running_reqs + load.num_waiting_reqs for load in self.loads),
            sum(load.num_used_tokens for load in self.loads),
            _mean([load.token_usage for load in self.loads if load.token_usage is not None]),
            _mean([load.cache_hit_rate for load in self.loads if load.cache_hit_rate is not None]),
        )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
