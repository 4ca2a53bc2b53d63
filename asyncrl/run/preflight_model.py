"""Pre-flight checks of the model, and of the machine, without loading the model."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncrl.config.check import Finding
from asyncrl.config.settings import Config
from asyncrl.data.model_dir import ModelError, check_model_directory, tensor_shapes
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.engine.embedded.config import ModelConfig, read_config, read_shape
from asyncrl.engine.errors import EngineError
from asyncrl.process import python

_ASK_LIMIT_S = 300
# In processes of their own: torch takes seconds and 200 MB, and an engine may have packages of its own.
_COUNT_GPUS = "import torch; print(torch.cuda.device_count(), torch.__version__)"
_FIND_SGLANG = "import importlib.util; print(importlib.util.find_spec('sglang') is not None)"


def check_model(config: Config, base: Path) -> Iterator[Finding]:
    """Return whether the model directory is complete, consistent with its tokenizer, and can be trained and served."""
    if not config.model.path:
        return
    path = base / config.model.path
    try:
        context = check_model_directory(path).context
        shape = read_config(path) if "embedded" in config.engine.kinds else read_shape(path)
        _compare_weights(path, shape)
        _compare_tokenizer(path, shape)
    except (ModelError, EngineError, TokenizerError) as error:
        yield Finding(("model.path",), str(error))
        return
    for key, tokens in (
        ("rollout.max_new_tokens", config.rollout.max_new_tokens + 1),
        ("engine.context", config.engine.context),
    ):
        if tokens > context:
            message = f"a request would take {tokens} tokens, but the model at {path} takes {context}; lower it"
            yield Finding((key, "model.path"), message)


def _compare_weights(path: Path, shape: ModelConfig) -> None:
    there, implied = tensor_shapes(path), shape.tensors()
    for name, size in implied.items():
        if there.get(name) != size:
            found = f"it is {list(there[name])}" if name in there else "it is missing"
            raise ModelError(
                f"{path}: by config.json {name} is {list(size)}, in the weights {found}; they are of different models"
            )
    beyond = next((name for name in there if name.startswith(f"model.layers.{shape.layers}.")), None)
    if beyond:
        raise ModelError(f"{path}: the weights hold {beyond}, but by config.json there are {shape.layers} layers")


def _compare_tokenizer(path: Path, shape: ModelConfig) -> None:
    number, token = TaskTokenizer.load(path).greatest
    if number >= shape.vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has the token {token!r} with id {number}, the model has {shape.vocab_size} tokens; "
            "the tokenizer is of another model, or the model was not resized for it"
        )


def check_machine(config: Config) -> Iterator[Finding]:
    """Return whether there is here what the settings ask for: GPUs for the learner, the package of the engine."""
    device = config.learner.device
    cuda = re.fullmatch(r"cuda(?::(\d+))?", device)
    if cuda and config.learner.trainer == "torch":
        count, _, version = _asked(_COUNT_GPUS).partition(" ")
        if not count.isdecimal():
            yield Finding(
                ("learner.device",), f'found "{device}", and torch cannot be asked for GPUs: {count} {version}'
            )
        elif int(count) <= int(cuda[1] or 0):
            message = (
                f'found "{device}", but torch {version} finds {count} GPUs here; set "cpu", or install torch for CUDA'
            )
            yield Finding(("learner.device",), message)
    for pool, group in config.engine.pools.items():
        if group.kind == "sglang" and _asked(_FIND_SGLANG, group.environment) != "True":
            table = pool.replace("-", ".groups.")
            message = f'{table}.kind = "sglang", but there is no package sglang here; install it: pip install -e'
            message += f' ".[sglang]", or name its folder in {table}.environment.PYTHONPATH'
            yield Finding((f"{table}.kind",), message)
    if config.engine.router.count and importlib.util.find_spec("sglang_router") is None:
        message = "found 1, but there is no package sglang-router here; install it: pip install -e"
        yield Finding(("engine.router.count",), message + ' ".[sglang]"')


def _asked(code: str, environment: Mapping[str, str] | None = None) -> str:
    """The last line that a few lines of Python print."""
    command, variables = python("-c", code), {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_ASK_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {_ASK_LIMIT_S} s"
    return (done.stdout.strip() or done.stderr.strip() or "no answer").splitlines()[-1]
