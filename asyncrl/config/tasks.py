"""The tasks of a run: the one that `[task]` describes, or those of `[tasks.NAME]`, mixed by their shares."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.config.settings import Config
from asyncrl.data.sources import RowSetup, RowsPart, label_reader
from topics.ids import TASK
from topics.prompts import ONLY_TASK

_HELD_OUT = 1_000_003  # added to the seed: made rows of another seed are other rows
_ONE = {
    "source": "task.source",
    "options": "task.options",
    "rollout": "task.rollout",
    "reward": "reward.function",
    "group_size": "rollout.group_size",
    "temperature": "rollout.temperature",
    "advantage": "learner.advantage",
    "eval_source": "eval.source",
}  # settings of the one task, which are the defaults of several


class Task(NamedTuple):
    """A task with all that its groups are issued with."""

    name: str
    source: str
    options: dict[str, Any]
    rollout: str  # its rollout function
    reward: str  # its reward function
    group_size: int
    temperature: float
    advantage: str
    eval_source: str
    share: int = 1

    def keys(self, field: str) -> tuple[str, ...]:
        """Dotted keys of the settings that a field may come from, the first one first."""
        return (_ONE[field],) if self.name == ONLY_TASK else (f"tasks.{self.name}.{field}", _ONE[field])


def tasks_of(config: Config) -> dict[str, Task]:
    """All tasks of a run by name, in their order."""
    one = Task(
        ONLY_TASK,
        config.task.source,
        config.task.options,
        config.task.rollout,
        config.reward.function,
        config.rollout.group_size,
        config.rollout.temperature,
        config.learner.advantage,
        config.eval.source,
    )
    if not config.tasks:
        return {one.name: one}
    given = {name: msgspec.structs.asdict(settings) for name, settings in config.tasks.items()}
    return {
        name: one._replace(name=name, **{key: value for key, value in fields.items() if value is not None})
        for name, fields in given.items()
    }


def turns(shares: list[int]) -> list[int]:
    """Places of the tasks that have the prompts of one cycle, in the order of their issue.

    The next prompt is one of the task that had the fewest so far by its share, of equal ones the first. After as many
    prompts as the sum of all shares each task had as many as its share, and the order begins again.
    """
    dues = [(Fraction(count, share), place) for place, share in enumerate(shares) for count in range(1, share + 1)]
    return [place for _, place in sorted(dues)]


class Mixture:
    """The task of each prompt, by its number: a pure function of the settings."""

    def __init__(self, config: Config) -> None:
        self.tasks = list(tasks_of(config).values())
        self._turns = turns([task.share for task in self.tasks])

    def task(self, number: int) -> Task:
        """The task of a prompt, or of a held-out one."""
        return self.tasks[self._turns[number % len(self._turns)]]


def largest_group(config: Config) -> int:
    """Members of the largest group of RL."""
    return max(task.group_size for task in tasks_of(config).values())


def group_size_of(config: Config, prompt_id: str) -> int:
    """Members of a prompt's group; of one that was issued again those of the largest."""
    return Mixture(config).task(int(prompt_id[1:])).group_size if prompt_id[0] == TASK else largest_group(config)


def rows_of(config: Config, base: Path, *tasks: Task, held_out: bool = False) -> RowSetup:
    """The rows of some tasks as one order without end, of all of them unless some are given.

    Args:
        base: folder of the config's relative paths.
        held_out: those of evaluations.
    """
    tasks = tasks or tuple(tasks_of(config).values())
    parts = [
        RowsPart(
            task.eval_source or task.source if held_out else task.source,
            task.options,
            label_reader(task.reward, warmup_steps=0 if held_out else config.warmup.steps),
        )
        for task in tasks
    ]
    seed = config.seed + (_HELD_OUT if held_out else 0)
    return RowSetup(parts, turns([task.share for task in tasks]), seed, str(base))
