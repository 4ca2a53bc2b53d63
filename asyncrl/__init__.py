"""asyncrl: asynchronous reinforcement learning for language models, as actors that talk only through topics.

The names here are what rollout functions, rewards and programs of users import. Each is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.runtime.actor import Context as Context
    from actors.runtime.delivery import Delivery as Delivery
    from actors.runtime.keeper import Keeper as Keeper
    from actors.runtime.worker import WorkerLoop as WorkerLoop
    from asyncrl.algorithms.token_loss import Loss as Loss
    from asyncrl.algorithms.token_loss import Tokens as Tokens
    from asyncrl.bus.fold import Fold as Fold
    from asyncrl.bus.log import Record as Record
    from asyncrl.bus.publish import publish as publish
    from asyncrl.config.load import load_config as load_config
    from asyncrl.config.settings import Config as Config
    from asyncrl.errors import AsyncRLError as AsyncRLError
    from asyncrl.rewards.score import GradeRequest as GradeRequest
    from asyncrl.rewards.tournaments import TournamentReward as TournamentReward
    from asyncrl.rollout.context import Generated as Generated
    from asyncrl.rollout.context import RolloutContext as RolloutContext
    from asyncrl.rollout.context import ToolFailed as ToolFailed
    from asyncrl.training.dump import load_dump as load_dump
    from topics.actors import Waiting as Waiting
    from topics.prompts import PromptRow as PromptRow
    from topics.roles import Role as Role
    from topics.topic import Retention as Retention
    from topics.topic import Stream as Stream
    from topics.topic import Topic as Topic
    from topics.wire import Message as Message

_MODULES = {
    "AsyncRLError": "asyncrl.errors",
    "Config": "asyncrl.config.settings",
    "Context": "actors.runtime.actor",
    "Delivery": "actors.runtime.delivery",
    "Fold": "asyncrl.bus.fold",
    "Generated": "asyncrl.rollout.context",
    "GradeRequest": "asyncrl.rewards.score",
    "Keeper": "actors.runtime.keeper",
    "Loss": "asyncrl.algorithms.token_loss",
    "Message": "topics.wire",
    "PromptRow": "topics.prompts",
    "Record": "asyncrl.bus.log",
    "Retention": "topics.topic",
    "Role": "topics.roles",
    "RolloutContext": "asyncrl.rollout.context",
    "Stream": "topics.topic",
    "ToolFailed": "asyncrl.rollout.context",
    "Tokens": "asyncrl.algorithms.token_loss",
    "Topic": "topics.topic",
    "TournamentReward": "asyncrl.rewards.tournaments",
    "Waiting": "topics.actors",
    "WorkerLoop": "actors.runtime.worker",
    "load_config": "asyncrl.config.load",
    "load_dump": "asyncrl.training.dump",
    "publish": "asyncrl.bus.publish",
}
__all__ = [*_MODULES]  # noqa: PLE0604 - each is a string


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'asyncrl' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULES[name]), name)
