"""The tasks of a run: the one that `[task]` describes, or those of `[tasks.NAME]`, mixed by their shares."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from asyncrl.config.setting_types import given
from asyncrl.config.settings import Config, StartSettings, WarmupSettings
from asyncrl.config.task_settings import CurriculumSettings, RewardScope, TaskSettings
from asyncrl.data.curriculum import Curriculum, Ladder
from asyncrl.data.mastery import MasteryRule
from asyncrl.rewards.kinds import reward_of
from topics.ids import TASK, letter_of, number_of
from topics.prompts import ONLY_TASK

if TYPE_CHECKING:
    from asyncrl.data.sources import RowSetup
    from asyncrl.data.turns import Turns

Begun: TypeAlias = tuple[int, str]  # number of the first prompt of a stage, and its name
_HELD_OUT = 1_000_003  # added to the seed: made rows of another seed are other rows
_OF_STAGE = ("group_size", "temperature", "advantage")  # settings of tasks that a stage may change
_ONE = {
    "source": "task.source",
    "options": "task.options",
    "rollout": "task.rollout",
    "reward": "reward.function",
    "reward_scope": "reward.scope",
    "tournament": "reward.tournament",
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
    reward_scope: RewardScope = "trajectory"
    tournament: str = ""
    table: str = "tasks"  # of the config, where several are named
    curriculum: CurriculumSettings = CurriculumSettings()
    stage: str = ""  # of the run, where the task is as that has it
    staged: tuple[str, ...] = ()  # fields that the stage gives

    @property
    def ladder(self) -> Ladder | None:
        """The difficulty of its rows by level; None without a curriculum."""
        rule = self.curriculum
        return Ladder(rule.option, rule.first, rule.step, rule.last) if rule.option else None

    def keys(self, field: str) -> tuple[str, ...]:
        """Dotted keys of the settings that a field may come from, the first one first."""
        staged = (f"stages.{self.stage}.{field}",) if field in self.staged else ()
        if self.name == ONLY_TASK:
            return *staged, _ONE[field]
        own = "source" if self.table != "tasks" and field == "eval_source" else field  # a held-out set has no other
        return *staged, f"{self.table}.{self.name}.{own}", _ONE[field]


def the_one_task(config: Config) -> Task:
    """The task of `[task]`, whose settings are the defaults of several."""
    own = {field: attrgetter(key)(config) for field, key in _ONE.items()}
    return Task(ONLY_TASK, curriculum=config.task.curriculum, **own)


def tasks_of(config: Config) -> dict[str, Task]:
    """All tasks of a run by name, in their order."""
    one = the_one_task(config)
    if not config.tasks:
        return {one.name: one}
    return {name: one._replace(name=name, **given(settings)) for name, settings in config.tasks.items()}


def turns(shares: list[int]) -> list[int]:
    """Places of the tasks that have the prompts of one cycle, in the order of their issue.

    The next prompt is one of the task that had the fewest so far by its share, of equal ones the first. After as many
    prompts as the sum of all shares each task had as many as its share, and the order begins again. A share of 0 has no
    turn.
    """
    dues = [(Fraction(count, share), place) for place, share in enumerate(shares) for count in range(1, share + 1)]
    return [place for _, place in sorted(dues)]


class Mixture:
    """The task of each prompt, and the place of its row: a pure function of its number, the settings and the stages.

    A place is one in the order that the tasks' own shares give (`asyncrl.data.sources.MixedSource`), in any stage. A
    stage restarts the rotation, and each task continues with the row after its last one: none is skipped, none repeats.
    """

    def __init__(self, config: Config) -> None:
        self.tasks = list(tasks_of(config).values())
        self._turns = turns([task.share for task in self.tasks])
        self._staged = {name: list(stage_tasks(config, name).values()) for name in config.stages}
        self._stages = {name: turns([task.share for task in tasks]) for name, tasks in self._staged.items()}

    def task(self, number: int, begun: Sequence[Begun] = ()) -> Task:
        """The task of a prompt, as its stage has it, or of a held-out one."""
        stage = next((name for first, name in reversed(begun) if first <= number), "")
        return self._staged.get(stage, self.tasks)[self._turn(number, begun)[0]]

    def place(self, number: int, begun: Sequence[Begun] = ()) -> int:
        """The place of the row of a prompt in the endless order of the data; its number before the first stage."""
        if not begun:
            return number
        part, row = self._turn(number, begun)
        cycle, rest = divmod(row, self.tasks[part].share)
        return cycle * len(self._turns) + [at for at, turn in enumerate(self._turns) if turn == part][rest]

    def _turn(self, number: int, begun: Sequence[Begun]) -> tuple[int, int]:
        """Number of the task of a prompt, and how many prompts of that task came before."""
        first, current = 0, self._turns
        rows = [0] * len(self.tasks)
        for begin, name in begun:
            if begin > number:
                break
            rows = [count + _turns_of(current, part, begin - first) for part, count in enumerate(rows)]
            first, current = begin, self._stages[name]
        part = current[(number - first) % len(current)]
        return part, rows[part] + _turns_of(current, part, number - first)


def _turns_of(order: list[int], part: int, prompts: int) -> int:
    """Turns of a task among this many prompts."""
    cycles, rest = divmod(prompts, len(order))
    return cycles * order.count(part) + order[:rest].count(part)


def stage_tasks(config: Config, name: str) -> dict[str, Task]:
    """All tasks of a stage, by name, in their order."""
    stage = config.stages[name]
    own = given(stage, _OF_STAGE)
    return {
        task.name: task._replace(share=stage.shares.get(task.name, task.share), stage=name, staged=tuple(own), **own)
        for task in tasks_of(config).values()
    }


def every_task(config: Config) -> list[Task]:
    """All tasks, and then as each stage has them that changes more of them than their shares."""
    staged = [task for name in config.stages for task in stage_tasks(config, name).values()]
    checked = {name for name, stage in config.stages.items() if (stage.filters, stage.teacher.coef) != (None, None)}
    changing = [task for task in staged if task.staged or task.stage in checked]
    return [*tasks_of(config).values(), *changing]


def first_stages(start: StartSettings) -> list[Begun]:
    """The stages before the fork of a run, in their order."""
    return sorted((int(number), name) for number, name in start.stages.items())


def largest_group(config: Config) -> int:
    """Members of the largest group of RL."""
    return max(task.group_size for task in every_task(config)) + config.rollout.oversample


def group_size_of(config: Config, prompt_id: str, begun: Sequence[Begun] = ()) -> int:
    """Members of a prompt's group; of one that was issued again those of the largest."""
    if letter_of(prompt_id) != TASK:
        return largest_group(config)
    return Mixture(config).task(number_of(prompt_id), begun).group_size + config.rollout.oversample


def curricula_of(config: Config) -> dict[str, Curriculum]:
    """The rules of the tasks whose difficulty rises, by name."""
    found = {}
    for task in tasks_of(config).values():
        if task.ladder is not None:
            rule = task.curriculum
            answers = rule.groups * task.group_size
            found[task.name] = Curriculum(
                rule.window, task.ladder.top, answers, rule.accuracy, rule.passing, config.seed
            )
    return found


def mastery_of(config: Config, rows: int | None) -> MasteryRule | None:
    """The rule by which rows leave the order of the data; None without one, and for data without end.

    Args:
        rows: of an epoch.
    """
    rule = config.task.mastered
    if not rule.groups or rows is None:
        return None
    return MasteryRule(rule.reward, rule.groups, rule.epochs, rows, config.seed)


def rows_of(config: Config, base: Path, *tasks: Task, held_out: bool = False) -> RowSetup:
    """The rows of some tasks as one order without end, of all of them unless some are given.

    Args:
        held_out: those of evaluations.
    """
    from asyncrl.data.sources import RowSetup, RowsPart, label_reader  # loads tokenizers and templates

    tasks = tasks or tuple(tasks_of(config).values())
    warmup_steps = 0 if held_out or config.warmup.source else config.warmup.steps
    parts = [
        RowsPart(
            task.eval_source or task.source if held_out else task.source,
            task.options,
            label_reader(
                graded=bool((reward := reward_of(task.reward)) and reward.reads_label), warmup_steps=warmup_steps
            ),
            _hardest(task) if held_out else task.ladder,
            config.task.max_prompt_tokens,
        )
        for task in tasks
    ]
    seed = config.seed + (_HELD_OUT if held_out else 0)
    model, shares = str(base / config.model.path), [task.share for task in tasks]
    return RowSetup(parts, turns(shares), seed, str(base), *_limits(config.task), model=model)


def turns_of(warmup: WarmupSettings) -> Turns:
    """The messages of supervised conversations that are trained."""
    from asyncrl.data.turns import Turns  # loads templates

    return Turns(tuple(warmup.roles), last=warmup.turns == "last")


def warmup_rows(config: Config, base: Path) -> RowSetup | None:
    """The rows of the warm-up, if it has its own."""
    from asyncrl.data.sources import RowSetup, RowsPart, label_reader  # loads tokenizers and templates

    warmup = config.warmup
    if not (warmup.source and warmup.steps):
        return None
    part = RowsPart(warmup.source, warmup.options, label_reader(graded=False, warmup_steps=warmup.steps))
    return RowSetup([part], [0], config.seed, str(base), *_limits(config.task))


def _limits(task: TaskSettings) -> tuple[float, float]:
    """Seconds that making one row, and opening the data, may take."""
    return task.row_limit_s, task.open_limit_s


def _hardest(task: Task) -> Ladder | None:
    """The last level alone, for held-out rows of the source whose difficulty rises, unless their set chooses it."""
    ladder = task.ladder
    if ladder is None or task.eval_source or ladder.option in task.options:
        return None
    hardest = ladder.value(ladder.top)
    return Ladder(ladder.option, hardest, 1, hardest)
