"""Estimates of memory from the shape of a model: of the learner, and of keys and values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.settings import Config
from asyncrl.config.trainers import trainer_kind
from asyncrl.engine.errors import EngineError


def memory_lines(config: Config, base: Path) -> Iterator[str]:
    """Tell what memory a rank takes, what embedded servers here have for keys and values, and how many requests fit."""
    yield from trainer_kind(config.learner.trainer).memory_lines(config, base)
    if not config.model.path or "engine" in config.placement.elsewhere:
        return
    for table, group in config.engine.tables.items():
        with contextlib.suppress(EngineError):  # reported where the model itself is checked
            yield from group.of_kind.memory_lines(table, group, config.engine, base / config.model.path)
