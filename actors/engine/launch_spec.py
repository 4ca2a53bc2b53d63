"""The arguments with which an engine actor starts, or finds, its server."""

from __future__ import annotations

from pathlib import Path

from actors.runtime.actor import Context
from asyncrl.config.devices import gpus_of_learner, memory_fraction, shares_with_learner
from asyncrl.config.engine_settings import Capability, EngineGroup
from asyncrl.config.pools import serves_clients
from asyncrl.config.settings import Config
from asyncrl.data.quantisation import quantised_as
from asyncrl.engine.control import ServerSpec
from asyncrl.engine.lora_serving import Shape
from topics.engines import EngineAnnounced


def home_of(context: Context, announced: EngineAnnounced | None, untrained: str) -> ServerSpec:
    """Return the arguments of the server of an engine actor.

    Args:
        announced: the announcement of its server, if it was made during the run.
        untrained: name of the weights of a model that is served untrained.

    Raises:
        ModelError: the model's directory is torn.
    """
    config, files, engine_id = context.config, context.files, context.actor_id
    log_file = files.logs / f"{engine_id}.server.log"
    key_file, model = files.engine_key_file(config.engine, engine_id), files.model_path(config.model)
    home = ServerSpec(engine_id, config.engine, model, log_file, key_file, host=context.host)
    home = home._replace(memory=memory_fraction(config, engine_id))
    home = home._replace(priorities=bool(config.gateway.count), form=config.weights.format)
    if config.gateway.count and serves_clients(config, engine_id):
        home = home._replace(gap_s=config.gateway.idle_wait_s)
    if announced is not None:
        home = home._replace(address=announced.address)
    if home.group.model:
        return home._replace(model=files.base / home.group.model, label=untrained, form="model")
    if not config.trains:
        return home._replace(label=untrained, form="model")
    lora = config.learner.lora
    if lora.rank and lora.publish == "adapter" and home.group.adapters == "served":
        return home._replace(serves=Shape(context.bus.run, lora.rank, tuple(lora.targets)))
    return home._replace(staged=_is_staged(config, engine_id, home.group, model))


def _is_staged(config: Config, engine_id: str, group: EngineGroup, model: Path) -> bool:
    """Return whether versions are copied into memory next to the server before its requests stop."""
    if group.staged != "auto":
        return group.staged == "always"
    if not group.on_gpus or not group.can(Capability.STAGED):
        return False
    if group.gpus_needed > 1 or config.weights.transport != "never":
        return False
    if gpus_of_learner(config.learner) and (not group.gpus or shares_with_learner(config, engine_id)):
        return False  # a trainer's memory grows and shrinks: memory that is free now may be missing later
    return quantised_as(model, config.weights.format) is None
