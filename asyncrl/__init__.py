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
    from asyncrl.api.check import check as check
    from asyncrl.api.run import Run as Run
    from asyncrl.api.run import attach as attach
    from asyncrl.api.start import up as up
    from asyncrl.bus.fold import Fold as Fold
    from asyncrl.bus.log import Record as Record
    from asyncrl.bus.publish import publish as publish
    from asyncrl.config.load import load_config as load_config
    from asyncrl.config.settings import Config as Config
    from asyncrl.errors import AsyncRLError as AsyncRLError
    from asyncrl.rewards.rubrics import Rubric as Rubric
    from asyncrl.rewards.score import GradeRequest as GradeRequest
    from asyncrl.rewards.tournaments import TournamentReward as TournamentReward
    from asyncrl.rollout.context import RolloutContext as RolloutContext
    from asyncrl.rollout.context import ToolFailed as ToolFailed
    from asyncrl.rollout.generated import Generated as Generated
    from asyncrl.training.dump import load_dump as load_dump
    from topics.actors import Waiting as Waiting
    from topics.batches import BatchPacked as BatchPacked
    from topics.batches import BatchTrained as BatchTrained
    from topics.engines import EngineReady as EngineReady
    from topics.evals import EvalScored as EvalScored
    from topics.groups import GroupDropped as GroupDropped
    from topics.prompts import PromptIssued as PromptIssued
    from topics.prompts import PromptRow as PromptRow
    from topics.roles import Role as Role
    from topics.topic import Retention as Retention
    from topics.topic import Stream as Stream
    from topics.topic import Topic as Topic
    from topics.trajectories import Reference as Reference
    from topics.trajectories import Segment as Segment
    from topics.trajectories import TrajectoryDropped as TrajectoryDropped
    from topics.trajectories import TrajectoryFailed as TrajectoryFailed
    from topics.trajectories import TrajectoryGenerated as TrajectoryGenerated
    from topics.trajectories import TrajectoryGraded as TrajectoryGraded
    from topics.weights import WeightsPublished as WeightsPublished
    from topics.wire import Message as Message

_NAMES = {  # by the module that has them
    "actors.runtime.actor": "Context",
    "actors.runtime.delivery": "Delivery",
    "actors.runtime.keeper": "Keeper",
    "actors.runtime.worker": "WorkerLoop",
    "asyncrl.algorithms.token_loss": "Loss Tokens",
    "asyncrl.api.check": "check",
    "asyncrl.api.run": "Run attach",
    "asyncrl.api.start": "up",
    "asyncrl.bus.fold": "Fold",
    "asyncrl.bus.log": "Record",
    "asyncrl.bus.publish": "publish",
    "asyncrl.config.load": "load_config",
    "asyncrl.config.settings": "Config",
    "asyncrl.errors": "AsyncRLError",
    "asyncrl.rewards.rubrics": "Rubric",
    "asyncrl.rewards.score": "GradeRequest",
    "asyncrl.rewards.tournaments": "TournamentReward",
    "asyncrl.rollout.context": "RolloutContext ToolFailed",
    "asyncrl.rollout.generated": "Generated",
    "asyncrl.training.dump": "load_dump",
    "topics.actors": "Waiting",
    "topics.batches": "BatchPacked BatchTrained",
    "topics.engines": "EngineReady",
    "topics.evals": "EvalScored",
    "topics.groups": "GroupDropped",
    "topics.prompts": "PromptIssued PromptRow",
    "topics.roles": "Role",
    "topics.topic": "Retention Stream Topic",
    "topics.trajectories": "Reference Segment TrajectoryDropped TrajectoryFailed TrajectoryGenerated TrajectoryGraded",
    "topics.weights": "WeightsPublished",
    "topics.wire": "Message",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [*_MODULES]  # noqa: PLE0604 - each is a string


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'asyncrl' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULES[name]), name)
