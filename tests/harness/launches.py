"""Runs that are prepared, not started."""

from pathlib import Path

import msgspec

from asyncrl.config.load import LoadedConfig
from asyncrl.config.settings import Config
from asyncrl.run.launch import Launch


def prepared(folder: Path, **tables: object) -> Launch:
    """A run that has a directory and its lock."""
    config = msgspec.convert({"run": "demo", "directory": str(folder / "runs"), **tables}, Config)
    launch = Launch(LoadedConfig(config, folder, folder / "demo.toml"))
    launch.prepare()
    return launch
