"""Stages of a run: its settings as each has them, and when one begins by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypeVar

import msgspec

from asyncrl.algorithms.lag import open_groups
from asyncrl.config.setting_types import given
from asyncrl.config.settings import Config, LearnerSettings
from asyncrl.config.task_settings import StageSettings
from asyncrl.config.tasks import Begun
from topics.ids import TASK, letter_of, number_of

Table = TypeVar("Table", bound=msgspec.Struct)

OF_LEARNER = (
    *("advantage", "loss", "loss_options", "aggregation", "filters"),
    *("lr", "weight_decay", "max_grad_norm", "turn_discount", "whiten"),
)
"""Settings of the learner that a stage may change, in addition to those of the further models."""
_MODELS = ("reference", "teacher", "critic")


def as_in(config: Config, stage: str) -> Config:
    """The settings in a stage; unchanged for "", before the first one."""
    if not stage:
        return config
    learner = config.learner
    for key, value in of_learner(config.stages[stage]).items():
        learner = _with(learner, key, value)
    return msgspec.structs.replace(config, learner=learner)


def _with(table: Table, key: str, value: object) -> Table:
    """A table with another value at a dotted key."""
    first, _, rest = key.partition(".")
    return msgspec.structs.replace(table, **{first: _with(getattr(table, first), rest, value) if rest else value})


def of_learner(stage: StageSettings) -> dict[str, object]:
    """The settings of the learner that a stage gives, by their dotted keys below `learner`."""
    found = given(stage, OF_LEARNER)
    for model in _MODELS:
        found |= {f"{model}.{key}": value for key, value in given(getattr(stage, model)).items()}
    if "loss" in found:
        found.setdefault("loss_options", {})
    return found


def key_of_learner(stages: Mapping[str, StageSettings], stage: str, field: str) -> str:
    """Dotted key of the setting that a field of the learner comes from in a stage."""
    return f"stages.{stage}.{field}" if stage and field in of_learner(stages[stage]) else f"learner.{field}"


def all_learners(config: Config) -> dict[str, LearnerSettings]:
    """The settings of the learner before the first stage, as "", and in each that changes them."""
    changing = [name for name, stage in config.stages.items() if of_learner(stage)]
    return {name: as_in(config, name).learner for name in ("", *changing)}


def all_filters(config: Config) -> list[str]:
    """The filters of all stages, each once."""
    return list(dict.fromkeys(name for learner in all_learners(config).values() for name in learner.filters))


class Ended(msgspec.Struct):
    """The part of a run that the conditions of stages look at, as plain data."""

    step: int = 0  # newest batch of RL that was packed
    rewards: list[tuple[int, float]] = []  # number and mean reward of the newest groups that ended


class Schedule:
    """The stages that begin by themselves, each once: of those that have not begun, the first in the config is next.

    Its condition looks only at the log of batches and at the stages that began: any reader of these reaches the same
    result. The mean reward is that before shaping, with equal weight for each group.
    """

    def __init__(self, config: Config) -> None:
        self._waiting = {
            name: stage for name, stage in config.stages.items() if stage.at_step or stage.at_accuracy is not None
        }
        groups = [stage.accuracy_groups for stage in self._waiting.values() if stage.at_accuracy is not None]
        # Groups of the stage before may end among those of the running one: as many as may be open at once.
        opened = open_groups(config.buffer.batch_groups, config.buffer.max_lag)
        self._kept = max(groups) + opened if groups else 0

    def count(self, ended: Ended, prompt_id: str, scores: Sequence[float]) -> None:
        """Take note of a group that was packed, or dropped by a filter.

        Args:
            scores: rewards of its answers before shaping; none if it ended for another reason.
        """
        if self._kept and scores and letter_of(prompt_id) == TASK:
            ended.rewards = [*ended.rewards, (number_of(prompt_id), fmean(scores))][-self._kept :]

    def due(self, ended: Ended, begun: Sequence[Begun]) -> str:
        """The stage that begins now; "" for none."""
        before = {name for _, name in begun}
        name = next((name for name in self._waiting if name not in before), "")
        if not name:
            return ""
        stage, first = self._waiting[name], begun[-1][0] if begun else 0
        if stage.at_accuracy is None:
            return name if ended.step >= stage.at_step else ""
        rewards = [reward for number, reward in ended.rewards if number >= first][-stage.accuracy_groups :]
        enough = len(rewards) == stage.accuracy_groups
        return name if enough and fmean(rewards) >= stage.at_accuracy else ""
