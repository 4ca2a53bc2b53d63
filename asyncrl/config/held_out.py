"""The held-out sets of a run: the one that `[eval]` describes, or those of `[eval.sets.NAME]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.config.setting_types import given
from asyncrl.config.settings import Config
from asyncrl.config.tasks import Task, rows_of, tasks_of, the_one_task

if TYPE_CHECKING:
    from asyncrl.data.sources import RowSetup

ONLY_SET = ""  # name of the set of a run that has one
_HELD_OUT_ROWS = "held-out"


class HeldOut(NamedTuple):
    """A held-out set with all that its evaluations are made by."""

    name: str
    prompts: int
    samples: int  # answers of each prompt
    temperature: float
    max_new_tokens: int
    pass_at: list[int]
    pass_reward: float

    @property
    def members(self) -> int:
        """Trajectories of one evaluation."""
        return self.prompts * self.samples

    @property
    def data(self) -> str:
        """Name of its rows among the data of the prompter."""
        return f"{_HELD_OUT_ROWS}/{self.name}" if self.name else _HELD_OUT_ROWS

    def key(self, field: str) -> str:
        """Dotted key of the setting that a field may come from first."""
        return f"eval.sets.{self.name}.{field}" if self.name else f"eval.{field}"


def held_out_sets(config: Config) -> dict[str, HeldOut]:
    """All sets that are evaluated, by name, in their order."""
    settings = config.eval
    one = HeldOut(
        ONLY_SET,
        settings.prompts,
        settings.samples,
        settings.temperature,
        settings.max_new_tokens or config.rollout.max_new_tokens,
        settings.pass_at,
        settings.pass_reward,
    )
    sets = [one]
    if settings.sets:
        sets = [one._replace(name=name, **given(own, HeldOut._fields[1:])) for name, own in settings.sets.items()]
    return {held_out.name: held_out for held_out in sets if held_out.prompts}


def evaluated_sets(config: Config, step: int) -> list[str]:
    """Return the names of the held-out sets that are evaluated on the version of a step: the first version, the last,
    and every `eval.every`-th.
    """
    every, ends = config.eval.every, (config.start.step, config.learner.steps)
    is_due = step in ends or (every > 0 and step % every == 0)
    return [*held_out_sets(config)] if is_due and step >= 0 else []


def set_of(sets: Mapping[str, HeldOut], task: str) -> HeldOut:
    """The set of an evaluation's trajectory, by its task: named sets are separate tasks."""
    return sets[task] if task in sets else sets[ONLY_SET]


def tasks_of_sets(config: Config) -> dict[str, Task]:
    """The named sets as tasks: their rows, rollout functions and rewards."""
    one = the_one_task(config)._replace(group_size=1, table="eval.sets")
    found = {}
    for name, own in config.eval.sets.items():
        fields = given(own, ("options", "rollout", "reward", "reward_scope", "tournament"))
        found[name] = one._replace(name=name, eval_source=own.source or one.eval_source, **fields)
    return found


def graded_tasks(config: Config) -> dict[str, Task]:
    """All tasks whose trajectories run a rollout function and get a reward: those of RL, and the named sets."""
    return tasks_of(config) | tasks_of_sets(config)


def held_out_rows(config: Config, base: Path, name: str) -> RowSetup:
    """The rows of a set."""
    own = () if name == ONLY_SET else (tasks_of_sets(config)[name],)
    return rows_of(config, base, *own, held_out=True)
