"""The GPUs of the learner and of each server, and the servers that share a GPU with the learner."""

from __future__ import annotations

from asyncrl.config.engine_settings import EngineGroup
from asyncrl.config.settings import Config, LearnerSettings
from topics.roles import number_in_pool


def gpus_of_learner(learner: LearnerSettings) -> range:
    """Return the numbers of the learner's GPUs; empty on a CPU."""
    device, _, number = learner.device.partition(":")
    if device != "cuda":
        return range(0)
    return range(int(number), int(number) + 1) if number else range(learner.ranks)


def gpus_of_server(group: EngineGroup, number: int) -> list[int]:
    """Return the numbers of the GPUs of a server of a group, which is the server 0, 1 and so on.

    Servers that are given none all take the first ones.
    """
    if not group.gpus:
        return list(range(group.gpus_needed))
    return group.gpus[number * group.gpus_each : (number + 1) * group.gpus_each]


def shares_with_learner(config: Config, engine_id: str) -> bool:
    """Return whether an engine has a GPU of the learner; on a CPU all have."""
    own = gpus_of_learner(config.learner)
    group = config.engine.group_of(engine_id)
    return not own or not set(own).isdisjoint(gpus_of_server(group, number_in_pool(engine_id) - 1))


def memory_fraction(config: Config, engine_id: str) -> float:
    """Return the part of its GPU's memory that a server has by `placement.engine_fraction`; 0 leaves its arguments."""
    group, placement = config.engine.group_of(engine_id), config.placement
    if placement.colocate != "memory" or not group.on_gpus or not shares_with_learner(config, engine_id):
        return 0.0
    return placement.engine_fraction
