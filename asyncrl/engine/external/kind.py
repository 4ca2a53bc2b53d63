"""The kind of servers that their owner has started."""

from __future__ import annotations

from collections.abc import Collection

from asyncrl.config.engine_settings import Capability, EngineGroup, EngineKind
from asyncrl.engine.sglang.kind import unfused


class External(EngineKind):
    """SGLang servers with settings that only their owner knows."""

    title = "external servers"
    capabilities = frozenset(Capability) - {
        Capability.PROCESSES,
        Capability.STAGED,
        Capability.SLEEP,
        Capability.PROFILES,
    }
    control = "asyncrl.engine.external.control:ExternalControl"

    def adapter_problem(self, _group: EngineGroup, targets: Collection[str]) -> str:
        return unfused(targets)


KIND = External()
