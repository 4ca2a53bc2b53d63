"""asyncrl: asynchronous reinforcement learning for language models, as actors that talk only through topics.

The names here are what rollout functions, rewards and programs of users import. Each is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.config.load import load_config
    from asyncrl.config.settings import Config
    from asyncrl.errors import AsyncRLError
    from asyncrl.rewards.frames import GradeRequest
    from asyncrl.rollout.context import Generated, RolloutContext, ToolFailed
    from topics.prompts import PromptRow

__all__ = [
    "AsyncRLError",
    "Config",
    "Generated",
    "GradeRequest",
    "PromptRow",
    "RolloutContext",
    "ToolFailed",
    "load_config",
]

_MODULES = {
    "AsyncRLError": "asyncrl.errors",
    "Config": "asyncrl.config.settings",
    "Generated": "asyncrl.rollout.context",
    "GradeRequest": "asyncrl.rewards.frames",
    "PromptRow": "topics.prompts",
    "RolloutContext": "asyncrl.rollout.context",
    "ToolFailed": "asyncrl.rollout.context",
    "load_config": "asyncrl.config.load",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'asyncrl' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULES[name]), name)
