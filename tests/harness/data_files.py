"""Files of rows, and what opening them gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.sources import open_source
from asyncrl.environments.protocol import DataError, DataSource


def write_rows(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def opened(base: Path, spec: str = "rows.jsonl", *, seed: int = 1, labels_for: str = "", **options: Any) -> DataSource:
    return open_source(spec, options=options, seed=seed, base=base, labels_for=labels_for)


def refused(base: Path, spec: str = "rows.jsonl", *, labels_for: str = "", **options: Any) -> str:
    with pytest.raises(DataError) as error:
        opened(base, spec, labels_for=labels_for, **options)
    return str(error.value)
