"""The kind of engines without a model."""

from __future__ import annotations

from asyncrl.config.engine_settings import Capability, EngineKind


class Scripted(EngineKind):
    """No servers: clients make tokens up."""

    title = "scripted engines"
    capabilities = frozenset({Capability.SEEDS})
    control = "asyncrl.engine.scripted.control:ScriptedControl"
    client = "asyncrl.engine.scripted.client:open_client"


KIND = Scripted()
