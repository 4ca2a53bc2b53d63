"""Trials of rewards for `asyncrl check`: each of the user's is called once, and labels are held against the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.child_pool.frames import CallFailed
from asyncrl.config.finding import Finding
from asyncrl.config.held_out import graded_tasks, tasks_of_sets
from asyncrl.config.settings import Config
from asyncrl.config.task_settings import RewardSettings
from asyncrl.config.tasks import Task, rows_of, tasks_of
from asyncrl.data.row_maker import sample_rows
from asyncrl.data.sources import RowSetup
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.rewards.graders import GradeResult, GroupGrader, GroupReward, open_grader
from asyncrl.rewards.kinds import BUILT_IN, reward_of
from asyncrl.rewards.score import GradeRequest

_ROWS, _READ_S = 1000, 3.0  # of each task
_LABELS = 64  # of each task, that are graded


def reward_lines(config: Config, base: Path) -> Iterator[str]:
    """Yield what each function gives to the label of a row as completion, or why that has no reward.

    It is no reason to refuse a config: a reward may well raise for a completion that no policy samples. Judges of
    tournaments are not called, nor are rewards over HTTP, which may cost something.
    """
    sets, tried = tasks_of_sets(config), set[tuple[str, str]]()
    for name, task in graded_tasks(config).items():
        once = (task.reward, task.reward_scope) not in tried
        if once and (reward := reward_of(task.reward)) and reward.lists and not reward.remote and not task.tournament:
            tried.add((task.reward, task.reward_scope))
            yield asyncio.run(_line(config.reward, base, task, rows_of(config, base, task, held_out=name in sets)))


def label_hints(config: Config, base: Path) -> Iterator[str]:
    """Yield for each task the longest label that no answer can equal, where the reward compares text exactly."""
    limit = config.rollout.max_new_tokens
    for task in tasks_of(config).values() if config.rolls_out else ():
        reward = reward_of(task.reward)
        if reward is None or not reward.compares or task.rollout != "single_turn":
            continue
        _, rows = asyncio.run(sample_rows(rows_of(config, base, task), _ROWS, _READ_S))
        tokens_of = TaskTokenizer.load(base / config.model.path).encode if config.model.path else list
        lengths = [len(tokens_of(str(row.label).strip())) for row in rows]
        if (longest := max(lengths)) > limit:
            row = rows[lengths.index(longest)]
            yield (
                f"{sum(length > limit for length in lengths):,} of {len(rows):,} rows of {task.source} have a label "
                f"that no answer can equal: that of the prompt {str(row.prompt)[:60]!r} has {longest:,} tokens, "
                f"rollout.max_new_tokens = {limit:,}; raise it"
            )


def label_faults(config: Config, base: Path) -> Iterator[Finding]:
    """Find labels that a built-in reward refuses: each of the first rows is graded once, with an empty answer."""
    sets = tasks_of_sets(config)
    for name, task in graded_tasks(config).items():
        reward = BUILT_IN.get(task.reward)
        if reward is not None and reward.reads_label and not reward.compares:
            fault = asyncio.run(
                _label_fault(config.reward, base, task, rows_of(config, base, task, held_out=name in sets))
            )
            if fault:
                yield Finding((*task.keys("source"), *task.keys("reward")), fault)


async def _label_fault(reward: RewardSettings, base: Path, task: Task, rows: RowSetup) -> str:
    _, found = await sample_rows(rows, _LABELS, _READ_S)
    grader = await open_grader(task.reward, base=base, time_limit_s=reward.time_limit_s, memory_mb=reward.memory_mb)
    try:
        for row in found:
            await grader.grade(GradeRequest("", row.prompt, row.label, row.metadata, "p000000-0"))
    except CallFailed as error:
        words = str(error).splitlines()[-1]  # of a traceback what was raised
        advice = "name the column of the answer with label_key, or make it with convert"
        return f"the reward {task.reward} refuses the label of the prompt {str(row.prompt)[:60]!r}: {words}; {advice}"
    finally:
        await grader.close()
    return ""


async def _line(reward: RewardSettings, base: Path, task: Task, rows: RowSetup) -> str:
    _, (row, *_) = await sample_rows(rows, 1, 0.0)
    label = row.label if isinstance(row.label, str | int | float) else ""
    request = GradeRequest(str(label), row.prompt, row.label, row.metadata, "p000000-0")
    shown = repr(str(label)[:40])
    what = f"the reward {task.reward}, called with the label {shown} of the first row that is issued as completion"
    try:
        found = await _graded(reward, base, task, request)
    except CallFailed as error:
        found = str(error).splitlines()[-1]  # the exception of a traceback
    return f"hint: {what}, gives none: {found}" if isinstance(found, str) else f"{what}, gives {found.reward:g}"


async def _graded(reward: RewardSettings, base: Path, task: Task, request: GradeRequest) -> GradeResult | str:
    limits: dict[str, Any] = {"time_limit_s": reward.time_limit_s, "memory_mb": reward.memory_mb}
    if task.reward_scope == "group":
        group = await GroupGrader.open(GroupReward(task.reward), base=base, workers=1, most=2, **limits)
        try:
            found = await group.grade([request, request])
            return next((one for one in found if isinstance(one, str)), found[0])
        finally:
            await group.close()
    grader = await open_grader(task.reward, base=base, batch=reward.batch, **limits)
    try:
        return await grader.grade(request)
    finally:
        await grader.close()
