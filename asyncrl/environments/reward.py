"""The reward of environments: each scores the answers to its rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from asyncrl.environment_names import EnvironmentCapability, environment_can
from asyncrl.environments.kinds import make
from asyncrl.environments.protocol import Environment
from topics.prompts import PromptRow


def make_reward(kind: str, name: str) -> Callable[..., float]:
    """Make the reward in [0, 1] by which environments of a kind score answers to their rows.

    Args:
        name: of the environment; if it is empty, each row's `metadata["source_dataset"]` names it.

    Raises:
        DataError: there is no such environment.
    """

    @lru_cache(maxsize=64)
    def environment(name: str, parameters: bytes) -> Environment:
        return make(kind, name, msgspec.json.decode(parameters), 0)

    def reward(completion: str, prompt: Any, label: Any = None, metadata: Any = None) -> float:
        named = name or metadata.get("source_dataset")
        if not named:
            raise ValueError(f"the row's metadata has no 'source_dataset'; name the reward {kind}:NAME")
        parameters = msgspec.json.encode(metadata.get("source_options") or {})
        return environment(named, parameters).score(completion, PromptRow(prompt, label, metadata))

    if name and not environment_can(kind, EnvironmentCapability.PROGRAM):  # else the row has its parameters
        environment(name, b"{}")
    return reward
