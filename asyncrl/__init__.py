"""asyncrl: asynchronous reinforcement learning for language models, as actors that talk only through topics.

The names here are what rollout functions, rewards and programs of users import. Each is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.runtime.actor import Context
    from actors.runtime.keeper import Keeper
    from actors.runtime.worker import Delivery, WorkerLoop
    from asyncrl.bus.fold import Fold, on
    from asyncrl.bus.log import Record
    from asyncrl.bus.publish import publish
    from asyncrl.config.load import load_config
    from asyncrl.config.settings import Config
    from asyncrl.errors import AsyncRLError
    from asyncrl.rewards.score import GradeRequest
    from asyncrl.rollout.context import Generated, RolloutContext, ToolFailed
    from topics.prompts import PromptRow
    from topics.roles import Role
    from topics.topic import Retention, Stream, Topic
    from topics.wire import Message

__all__ = [
    "AsyncRLError",
    "Config",
    "Context",
    "Delivery",
    "Fold",
    "Generated",
    "GradeRequest",
    "Keeper",
    "Message",
    "PromptRow",
    "Record",
    "Retention",
    "Role",
    "RolloutContext",
    "Stream",
    "ToolFailed",
    "Topic",
    "WorkerLoop",
    "load_config",
    "on",
    "publish",
]

_MODULES = {
    "AsyncRLError": "asyncrl.errors",
    "Config": "asyncrl.config.settings",
    "Context": "actors.runtime.actor",
    "Delivery": "actors.runtime.worker",
    "Fold": "asyncrl.bus.fold",
    "Generated": "asyncrl.rollout.context",
    "GradeRequest": "asyncrl.rewards.score",
    "Keeper": "actors.runtime.keeper",
    "Message": "topics.wire",
    "PromptRow": "topics.prompts",
    "Record": "asyncrl.bus.log",
    "Retention": "topics.topic",
    "Role": "topics.roles",
    "RolloutContext": "asyncrl.rollout.context",
    "Stream": "topics.topic",
    "ToolFailed": "asyncrl.rollout.context",
    "Topic": "topics.topic",
    "WorkerLoop": "actors.runtime.worker",
    "load_config": "asyncrl.config.load",
    "on": "asyncrl.bus.fold",
    "publish": "asyncrl.bus.publish",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'asyncrl' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULES[name]), name)
