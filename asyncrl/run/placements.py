"""The placements that there are, by the value of `placement.kind`."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.config.settings import Config
from asyncrl.run.directory import RunFiles
from asyncrl.run.placement import LocalProcesses, Placement


def _ray(config: Config, files: RunFiles) -> Placement:
    from asyncrl.run.ray_placement import RayPlacement  # no process of another placement needs it

    return RayPlacement(config, files)


PLACEMENTS: dict[str, Callable[[Config, RunFiles], Placement]] = {
    "local": lambda _config, files: LocalProcesses(files.logs),
    "ray": _ray,
}
