"""The load of a server, as it reports it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class EngineLoad(NamedTuple):
    """The load of a server; `tokens` grows while anything runs."""

    requests: int  # running and waiting
    tokens: int  # in the caches of running requests


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0


class ServerLoads(msgspec.Struct):
    """The answer to `GET /v1/loads`: a load for each scheduler of the server."""

    loads: list[_Load] = []

    @property
    def sum(self) -> EngineLoad:
        """Return the load of the whole server."""
        return EngineLoad(
            sum(load.num_running_reqs + load.num_waiting_reqs for load in self.loads),
            sum(load.num_used_tokens for load in self.loads),
        )
