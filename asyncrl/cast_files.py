"""What a cast names outside itself: files, functions, data and models that must be there before a run starts."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from asyncrl.bus.errors import BusUnreachable
from asyncrl.bus.logins import given_logins
from asyncrl.cast_check import Finding
from asyncrl.processes import python
from asyncrl.settings import Cast
from asyncrl.tasks.data import DataError, DataSource, open_source
from asyncrl.tasks.tokens import TaskTokenizer, TokenizerError
from asyncrl.training.checkpoint import CheckpointError, read_checkpoint
from asyncrl.training.model_dir import ModelError, check_model_directory

REWARDS = ("exact", "math", "reasoning-gym")
OTHER_REWARDS = ("http://", "https://", "reasoning-gym:")  # and something behind it
ROLLOUTS = ("single_turn",)

_LOAD_LIMIT_S = 300
_LOADED = 77  # not 0: a file that exits while it is imported may say 0
_CHECKED_ROWS = 1000
# In a process of its own: a user's file may print, hang or exit while it is imported.
_LOAD = """
import sys
from pathlib import Path
spec, base, *sys.path[:] = sys.argv[1:]
from asyncrl.tasks.functions import FunctionError, load_function
try:
    load_function(spec, base=Path(base))
except FunctionError as error:
    sys.exit(str(error))
sys.exit(77)
"""


def check_files(cast: Cast, base: Path) -> list[Finding]:
    """Everything about the files of a cast that can be known before a start.

    User functions are imported in a child process, data is opened and its first thousand rows are read.

    Args:
        cast: the settings.
        base: folder that the cast's relative paths are looked for in.
    """
    checks = (_secrets, _logins, _model, _start, _functions, _data)
    return [*_directory(cast, base), *(finding for check in checks for finding in check(cast, base))]


def _directory(cast: Cast, base: Path) -> Iterator[Finding]:
    wanted = Path(cast.directory).resolve()
    if any(0xD800 <= ord(letter) < 0xE000 for letter in f"{wanted}{base}"):  # how Python writes other bytes
        yield Finding(("directory",), f"{wanted} and {base}: these paths must be UTF-8; messages carry them")
        return
    there = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        message = f"{wanted} cannot be made: {there} is no folder that can be written; name another"
        yield Finding(("directory",), message)


def _secrets(cast: Cast, base: Path) -> Iterator[Finding]:
    for key, name in (
        ("nats.password_file", cast.nats.password_file),
        ("engine.api_key_file", cast.engine.api_key_file),
    ):
        if not name:
            continue
        path = base / name
        try:
            found = "nothing" if not path.read_text(encoding="utf-8").strip() else ""
        except (OSError, UnicodeDecodeError) as error:
            found = str(error)
        if found:
            yield Finding((key,), f"found {found} in {path}, expected a readable file that holds the secret")


def _logins(cast: Cast, base: Path) -> Iterator[Finding]:
    given = [key for key in ("credentials", "nkey_file", "tls_ca", "tls_cert") if getattr(cast.nats, key)]
    if not (given and cast.nats.url):
        return
    try:
        for login in given_logins(cast.nats, base).values():
            login.login()
    except (BusUnreachable, OSError, ValueError) as error:
        yield Finding(tuple(f"nats.{key}" for key in given), str(error))


def _model(cast: Cast, base: Path) -> Iterator[Finding]:
    if not cast.model.path:
        return
    path = base / cast.model.path
    try:
        context = check_model_directory(path).context
    except ModelError as error:
        yield Finding(("model.path",), str(error))
        return
    for key, tokens in (
        ("rollout.max_new_tokens", cast.rollout.max_new_tokens + 1),
        ("engine.context", cast.engine.context),
    ):
        if tokens > context:
            message = f"a request would take {tokens} tokens, but the model at {path} takes {context}; lower it"
            yield Finding((key, "model.path"), message)


def _start(cast: Cast, base: Path) -> Iterator[Finding]:
    if not cast.start.checkpoint:
        return
    try:
        found = read_checkpoint(base / cast.start.checkpoint)
    except CheckpointError as error:
        yield Finding(("start.checkpoint",), str(error))
        return
    if found.step != cast.start.step:
        yield Finding(
            ("start.step", "start.checkpoint"), f"found {cast.start.step}, the checkpoint is of step {found.step}"
        )


def _functions(cast: Cast, base: Path) -> Iterator[Finding]:
    for key, spec, known in (
        ("reward.function", cast.reward.function, REWARDS),
        ("task.rollout", cast.task.rollout, ROLLOUTS),
    ):
        if spec in known or (key == "reward.function" and spec.startswith(OTHER_REWARDS)):
            continue
        near = difflib.get_close_matches(spec, known, n=1)
        if ":" not in spec:
            meant = f"; did you mean {near[0]}?" if near else ""
            message = (
                f'found "{spec}", expected {", ".join(known)}, path/to/file.py:function or package.module:function'
            )
            yield Finding((key,), message + meant)
        elif problem := _load_problem(spec, base):
            yield Finding((key,), problem)


def _load_problem(spec: str, base: Path) -> str:
    """Why a function cannot be loaded; empty when it can."""
    command = python("-c", _LOAD, spec, str(base), *sys.path)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LOAD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{spec} was not imported within {_LOAD_LIMIT_S} s; keep slow work out of the top of the file"
    if done.returncode == _LOADED:
        return ""
    return done.stderr.strip() or f"{spec}: importing it ended the process with status {done.returncode}"


def _data(cast: Cast, base: Path) -> Iterator[Finding]:
    needs_label = cast.reward.function in REWARDS or cast.warmup.steps > 0
    for key, spec in (("task.source", cast.task.source), ("eval.source", cast.eval.source)):
        if not spec:
            continue
        try:
            source = open_source(spec, options=cast.task.options, seed=cast.seed, base=base, needs_label=needs_label)
        except (DataError, OSError) as error:
            yield Finding((key, "task.options"), str(error))
            continue
        if key == "task.source" and cast.task.epochs:
            yield from _epochs(cast, source)
        yield from (_rows_for_model if cast.model.path else _rows_for_made_model)(cast, base, key, source)


def _epochs(cast: Cast, source: DataSource) -> Iterator[Finding]:
    """Whether so many epochs are prompts enough for all steps, if no group is dropped."""
    if source.rows_per_epoch is None:
        message = f"task.epochs = {cast.task.epochs} needs a file: {source.describe()}, each once; leave it at 0"
        yield Finding(("task.epochs", "task.source"), message)
        return
    prompts, groups = cast.task.epochs * source.rows_per_epoch - cast.start.prompt, cast.buffer.batch_groups
    if prompts < (cast.learner.steps - cast.start.step) * groups:
        found = f"{cast.task.epochs} epochs of {source.rows_per_epoch} rows fill {prompts // groups} batches"
        message = f"{found} of {groups} groups, learner.steps is {cast.learner.steps}; raise the one or lower the other"
        yield Finding(("task.epochs", "learner.steps"), message)


def _rows_for_model(cast: Cast, base: Path, key: str, source: DataSource) -> Iterator[Finding]:
    """Rows that the tokenizer of a model directory cannot read, or that leave no room for an answer."""
    path = base / cast.model.path
    try:
        room = check_model_directory(path).context - 1
        tokenizer = TaskTokenizer.load(path)
        for index in range(min(source.rows_per_epoch or _CHECKED_ROWS, _CHECKED_ROWS)):
            tokenizer.encode_prompt(source.row(index), max_tokens=room)
    except TokenizerError as error:
        yield Finding((key, "model.path"), f"{key}: {error}")
    except ModelError:
        return  # told where the model itself is checked


def _rows_for_made_model(cast: Cast, _base: Path, key: str, source: DataSource) -> Iterator[Finding]:
    """Rows that a model made from `model.create`, with one token per character, cannot read."""
    alphabet, context = set(cast.model.create.alphabet), cast.model.create.context
    for index in range(min(source.rows_per_epoch or _CHECKED_ROWS, _CHECKED_ROWS)):
        row = source.row(index)
        if not isinstance(row.prompt, str):
            yield Finding(
                (key, "model.path"), f"{key} holds chat messages, but a made model has no chat template; set model.path"
            )
            return
        label = str(row.label) if cast.warmup.steps and row.label is not None else ""
        unknown = "".join(sorted(set(row.prompt + label) - alphabet))
        if unknown:
            message = f'{key} has the prompt "{row.prompt}", but model.create.alphabet lacks "{unknown}"; add it'
            yield Finding((key, "model.create.alphabet", "model.path"), message)
            return
        tokens = len(row.prompt) + max(cast.rollout.max_new_tokens, len(label) + 1 if label else 0)
        if tokens > context:
            message = (
                f'{key} has the prompt "{row.prompt}", which takes {tokens} tokens with its answer, but '
                f"model.create.context = {context}; raise it"
            )
            yield Finding((key, "model.create.context", "rollout.max_new_tokens", "model.path"), message)
            return
