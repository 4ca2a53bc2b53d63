"""Pre-flight checks of a config's data."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.check import Finding
from asyncrl.config.settings import Config
from asyncrl.config.tasks import Task, rows_of, tasks_of
from asyncrl.data.model_dir import ModelError, check_model_directory
from asyncrl.data.protocol import DataError
from asyncrl.data.row_maker import Opened, RowMakerDown, sample_rows
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from topics.prompts import PromptRow

_FIRST_ROWS = 1000  # of the first epoch's order
_LONGEST_ROWS = 1000  # of a file: those that a model may not have room for
_READ_S = 3.0  # for rows that take long to make; the first one is waited for


def check_data(config: Config, base: Path) -> Iterator[Finding]:
    """Return whether the data opens, lasts for all steps, and has rows that the model can take."""
    for task in tasks_of(config).values():
        yield from _check_rows(config, base, task)
        if task.eval_source:
            yield from _check_rows(config, base, task, held_out=True)


def _check_rows(config: Config, base: Path, task: Task, *, held_out: bool = False) -> Iterator[Finding]:
    keys = task.keys("eval_source" if held_out else "source")
    setup = rows_of(config, base, task, held_out=held_out)
    setup.longest = _LONGEST_ROWS
    try:
        opened, rows = asyncio.run(sample_rows(setup, _FIRST_ROWS, _READ_S, limit_s=config.task.row_limit_s))
    except (DataError, RowMakerDown, OSError) as error:
        yield Finding((*keys, *task.keys("options")), str(error))
        return
    if config.task.epochs and not held_out:
        yield from _epochs(config, opened)
    check = _rows_for_model if config.model.path else _rows_for_made_model
    yield from check(config, base, keys[0], rows, supervised=config.warmup.steps > 0 and not held_out)


def _epochs(config: Config, data: Opened) -> Iterator[Finding]:
    """Return whether so many epochs are prompts enough for all steps, if no group is dropped."""
    if data.rows_per_epoch is None:
        message = f"task.epochs = {config.task.epochs} needs a file: {data.description}, each once; leave it at 0"
        yield Finding(("task.epochs", "task.source"), message)
        return
    prompts, groups = config.task.epochs * data.rows_per_epoch - config.start.prompt, config.buffer.batch_groups
    if prompts < (config.learner.steps - config.start.step) * groups:
        found = f"{config.task.epochs} epochs of {data.rows_per_epoch} rows fill {prompts // groups} batches"
        message = (
            f"{found} of {groups} groups, learner.steps is {config.learner.steps}; raise the one or lower the other"
        )
        yield Finding(("task.epochs", "learner.steps"), message)


def _rows_for_model(
    config: Config, base: Path, key: str, rows: list[PromptRow], *, supervised: bool
) -> Iterator[Finding]:
    """Rows that the tokenizer of a model directory cannot read, or that leave no room for an answer."""
    path = base / config.model.path
    try:
        context = check_model_directory(path).context
        tokenizer = TaskTokenizer.load(path)
        for row in rows:
            tokenizer.encode_prompt(row, max_tokens=context - 1)
            if supervised:
                tokenizer.encode_supervised(row, max_tokens=context)
    except TokenizerError as error:
        yield Finding((key, "model.path"), f"{key}: {error}")
    except ModelError:
        return  # reported where the model itself is checked


def _rows_for_made_model(
    config: Config, _base: Path, key: str, rows: list[PromptRow], *, supervised: bool
) -> Iterator[Finding]:
    """Rows that a model made from `model.create`, with one token per character, cannot read."""
    alphabet, context = set(config.model.create.alphabet), config.model.create.context
    for row in rows:
        if not isinstance(row.prompt, str):
            yield Finding(
                (key, "model.path"), f"{key} holds chat messages, but a made model has no chat template; set model.path"
            )
            return
        label = str(row.label) if supervised and row.label is not None else ""
        unknown = "".join(sorted(set(row.prompt + label) - alphabet))
        if unknown:
            message = f'{key} has the prompt "{row.prompt}", but model.create.alphabet lacks "{unknown}"; add it'
            yield Finding((key, "model.create.alphabet", "model.path"), message)
            return
        tokens = len(row.prompt) + max(config.rollout.max_new_tokens, len(label) + 1 if label else 0)
        if tokens > context:
            message = (
                f'{key} has the prompt "{row.prompt}", which takes {tokens} tokens with its answer, but '
                f"model.create.context = {context}; raise it"
            )
            yield Finding((key, "model.create.context", "rollout.max_new_tokens", "model.path"), message)
            return
