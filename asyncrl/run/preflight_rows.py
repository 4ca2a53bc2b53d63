"""Pre-flight checks of a config's data."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from asyncrl.config.finding import Finding
from asyncrl.config.held_out import tasks_of_sets
from asyncrl.config.settings import Config, WarmupSettings
from asyncrl.config.tasks import Task, rows_of, tasks_of, turns_of, warmup_rows
from asyncrl.data.model_dir import ModelError, check_model_directory
from asyncrl.data.row_maker import Opened, RowMakerDown, sample_rows
from asyncrl.data.sources import RowSetup
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError, shown
from asyncrl.environments.protocol import DataError
from asyncrl.training.init_model import write_tokenizer
from topics.prompts import PromptRow

_FIRST_ROWS = 1000  # of the first epoch's order
_LONGEST_ROWS = 1000  # of a file: those that a model may not have room for
_READ_S = 3.0  # for rows that take long to make; the first one is waited for


def check_data(config: Config, base: Path) -> Iterator[Finding]:
    """Return whether the data opens, lasts for all steps, and has rows that the model can take."""
    if not (config.rolls_out or config.trains):
        return  # no row is made
    for task in tasks_of(config).values():
        yield from _check_rows(config, base, task)
        if task.eval_source:
            yield from _check_rows(config, base, task, held_out=True)
    for task in tasks_of_sets(config).values():
        yield from _check_rows(config, base, task, held_out=True)
    if (own := warmup_rows(config, base)) is not None:
        yield from _check_setup(config, base, own, _Checked(("warmup.source",), ("warmup.options",), answered=False))


def row_lines(config: Config, base: Path) -> Iterator[str]:
    """Yield how many rows of each task are left out for the length of their prompts, if that is limited."""
    for task in tasks_of(config).values() if config.task.max_prompt_tokens else ():
        yield asyncio.run(sample_rows(rows_of(config, base, task), 1, 0.0))[0].description


class _Checked(NamedTuple):
    """Rows to check, and their known properties."""

    keys: tuple[str, ...]  # of the settings that name them
    options: tuple[str, ...]
    answered: bool = True  # by the policy, so that they are prompts
    supervised: bool = True
    held_out: bool = False


def _check_rows(config: Config, base: Path, task: Task, *, held_out: bool = False) -> Iterator[Finding]:
    keys = task.keys("eval_source" if held_out else "source")
    supervised = config.warmup.steps > 0 and not config.warmup.source and not held_out
    rows = _Checked(keys, task.keys("options"), supervised=supervised, held_out=held_out)
    yield from _check_setup(config, base, rows_of(config, base, task, held_out=held_out), rows)


def _check_setup(config: Config, base: Path, setup: RowSetup, what: _Checked) -> Iterator[Finding]:
    keys = what.keys
    setup.longest = _LONGEST_ROWS
    try:
        opened, rows = asyncio.run(sample_rows(setup, _FIRST_ROWS, _READ_S))
        if setup.functions:
            again = asyncio.run(sample_rows(setup, _FIRST_ROWS, _READ_S))[1]
            encoded = (map(msgspec.msgpack.encode, found) for found in (rows, again))  # a NaN equals no other
            differing = (place for place, (one, other) in enumerate(zip(*encoded, strict=False)) if one != other)
            if (place := next(differing, None)) is not None:
                names = " and ".join(dict.fromkeys(setup.functions))
                message = f"{names}: row {place} is another one when the data is opened again with the same seed"
                message += "; a resumed run needs the same rows: let them depend on the seed or the file only"
                yield Finding((*keys, *what.options), message)
                return
    except (DataError, RowMakerDown, OSError) as error:
        yield Finding((*keys, *what.options), str(error))
        return
    if config.task.mastered.groups and what.answered and not what.held_out and opened.rows_per_epoch is None:
        message = f"needs a finite number of rows: {opened.description}, each once; leave it at 0"
        yield Finding(("task.mastered.groups", *keys), message)
    if config.task.epochs and what.answered and not what.held_out:
        yield from _epochs(config, opened)
    check = _rows_for_model if config.model.path else _rows_for_made_model
    yield from check(config, base, rows, what)


def _epochs(config: Config, data: Opened) -> Iterator[Finding]:
    """Return whether this many epochs are enough prompts for all steps, if no group is dropped."""
    if data.rows_per_epoch is None:
        message = f"task.epochs = {config.task.epochs} needs a file: {data.description}, each once; leave it at 0"
        yield Finding(("task.epochs", "task.source"), message)
        return
    prompts, groups = config.task.epochs * data.rows_per_epoch - config.start.prompt, config.buffer.batch_groups
    if prompts < (config.learner.steps - config.start.step) * groups:
        found = f"{config.task.epochs} epochs of {data.rows_per_epoch} rows fill {prompts // groups} batches"
        message = f"{found} of {groups} groups, learner.steps is {config.learner.steps}; raise one or lower the other"
        yield Finding(("task.epochs", "learner.steps"), message)


def _rows_for_model(config: Config, base: Path, rows: list[PromptRow], what: _Checked) -> Iterator[Finding]:
    """Rows that the tokenizer of a model directory cannot read, or that leave no room for an answer."""
    path = base / config.model.path
    try:
        yield from _rows_for_tokenizer(config.warmup, path, check_model_directory(path).context, rows, what)
    except ModelError:
        return  # reported where the model itself is checked


def _rows_for_tokenizer(
    warmup: WarmupSettings, path: Path, context: int, rows: list[PromptRow], what: _Checked
) -> Iterator[Finding]:
    key, turns = what.keys[0], turns_of(warmup)
    try:
        tokenizer = TaskTokenizer.load(path)
        for row in rows:
            if what.answered:
                tokenizer.encode_prompt(row, max_tokens=context - 1)
            if what.supervised:
                tokenizer.encode_supervised(row, turns, max_tokens=context)
    except TokenizerError as error:
        yield Finding((key, "model.path"), f"{key}: {error}")


def _rows_for_made_model(config: Config, _base: Path, rows: list[PromptRow], what: _Checked) -> Iterator[Finding]:
    """Rows that a model made from `model.create`, with one token per character, cannot read."""
    create, key = config.model.create, what.keys[0]
    alphabet, context = set(create.alphabet), create.context
    if create.template:
        with TemporaryDirectory() as folder:
            write_tokenizer(Path(folder), create.alphabet, context=context, template=create.template)
            yield from _rows_for_tokenizer(config.warmup, Path(folder), context, rows, what)
        return
    for row in rows:
        if not isinstance(row.prompt, str):
            yield Finding(
                (key, "model.path", "model.create.template"),
                f"{key} holds chat messages, but the made model has no chat template; set model.create.template, or "
                "model.path",
            )
            return
        label = str(row.label) if what.supervised and row.label is not None else ""
        unknown = "".join(sorted(set(row.prompt + label) - alphabet))
        if unknown:
            message = f'{key} has the prompt {shown(row)}, but model.create.alphabet lacks "{unknown[:80]}"; add it'
            yield Finding((key, "model.create.alphabet", "model.path"), message)
            return
        sampled = config.rollout.max_new_tokens if what.answered else 0
        tokens = len(row.prompt) + max(sampled, len(label) + 1 if label else 0)
        if tokens > context:
            message = (
                f"{key} has the prompt {shown(row)}, which takes {tokens:,} tokens with its answer, but "
                f"model.create.context = {context}; raise it"
            )
            yield Finding((key, "model.create.context", "rollout.max_new_tokens", "model.path"), message)
            return
