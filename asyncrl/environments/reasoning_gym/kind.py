"""Environments of the reasoning-gym package: each dataset is one."""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.environments.protocol import DataError, Environment, EnvironmentKind, check_options, draw
from topics.prompts import PromptRow

_CHUNK_ROWS = 500
_OF_TUPLES = ("arc_agi", "rearc")  # compare boards of tuples, which travel as lists


class ReasoningGym:
    """A dataset. See `asyncrl.environments.protocol.Environment`.

    Every 500 rows come from a separate dataset with a hashed seed: some datasets know no index beyond their size, and
    the package itself adds seed and index, so that neighbouring seeds would share nearly all of their rows.
    """

    rows_per_epoch: int | None = None

    def __init__(self, name: str, options: dict[str, Any], seed: int) -> None:
        self._name, self._options, self._seed = name, options, seed
        self._chunk = lru_cache(maxsize=4)(self._make_chunk)
        self._chunk(0)

    def _make_chunk(self, chunk: int) -> Any:
        return _make_dataset(self._name, self._options, draw(f"reasoning-gym:{self._name}", self._seed, chunk, 2**31))

    def row(self, index: int) -> PromptRow:
        """The row at place `index`: label is the entry's answer, metadata what its scorer reads."""
        chunk, place = divmod(index, _CHUNK_ROWS)
        entry = self._chunk(chunk)[place]
        metadata = entry["metadata"] | {"source_dataset": self._name}
        if self._options:
            metadata["source_options"] = self._options
        plain = msgspec.msgpack.encode(PromptRow(entry["question"], entry["answer"], metadata), enc_hook=_plain)
        return msgspec.msgpack.decode(plain, type=PromptRow)

    def describe(self) -> str:
        """The dataset and its options."""
        options = "".join(f", {name}={value}" for name, value in self._options.items())
        return f"reasoning-gym {self._name}{options}"

    def score(self, completion: str, row: PromptRow) -> float:
        """Score the text between the last `<answer>` and `</answer>`, or else the whole completion, stripped."""
        from reasoning_gym.utils import extract_answer

        metadata = _as_tuples(row.metadata) if self._name in _OF_TUPLES else row.metadata
        answer = extract_answer(completion)
        entry = {"question": row.prompt, "answer": row.label, "metadata": metadata}
        return float(self._chunk(0).score_answer(completion.strip() if answer is None else answer, entry))


def _make_dataset(name: str, options: dict[str, Any], seed: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # Python warns of a package below as it compiles it
        from reasoning_gym.factory import DATASETS, create_dataset  # takes 0.6 s and 100 MB

    spec = f"reasoning-gym:{name}"
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)[:5]
        raise DataError(
            f"{spec}: the package has {len(DATASETS)} datasets, but not this one; close: {', '.join(close)}"
        )
    fields = {field.name for field in dataclasses.fields(DATASETS[name][1])}
    check_options(spec, options, fields - {"seed", "size"})
    try:
        return create_dataset(name, **options, seed=seed, size=_CHUNK_ROWS)
    except Exception as error:  # each dataset checks its configuration in its own way, mostly by assert
        raise DataError(f"{spec} refuses its options: {type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):  # before str: a numpy text is a str, too
        return value.item()
    if isinstance(value, str | set | frozenset):
        return str(value) if isinstance(value, str) else sorted(value)
    raise TypeError(f"a {type(value).__name__} in the entry cannot travel")


def _as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_tuples(item) for key, item in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


class _Kind(EnvironmentKind):
    """See `asyncrl.environments.protocol.EnvironmentKind`."""

    def make(self, name: str, parameters: dict[str, Any], seed: int, base: Path) -> Environment:
        return ReasoningGym(name, parameters, seed)


KIND = _Kind()
