"""The placements that there are, by the value of `placement.kind`."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.config.settings import Config
from asyncrl.run.directory import RunFiles
from asyncrl.run.placement import LocalProcesses, Placement
from asyncrl.run.ray_placement import RayPlacement

PLACEMENTS: dict[str, Callable[[Config, RunFiles], Placement]] = {
    "local": lambda _config, files: LocalProcesses(files.logs),
    "ray": RayPlacement,
}
