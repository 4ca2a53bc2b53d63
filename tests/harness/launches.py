"""Runs that are prepared, not started."""

from pathlib import Path

import msgspec

from asyncrl.config.load import LoadedCast
from asyncrl.config.settings import Cast
from asyncrl.run.launch import Launch


def prepared(folder: Path, **tables: object) -> Launch:
    """A run that has a directory and its lock."""
    cast = msgspec.convert({"run": "demo", "directory": str(folder / "runs"), **tables}, Cast)
    launch = Launch(LoadedCast(cast, folder, folder / "demo.toml"))
    launch.prepare()
    return launch
