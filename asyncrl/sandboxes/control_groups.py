"""Control groups (cgroups) of sandboxes, by which a limit holds for all processes together.

Version 1 and 2, where the worker may make groups: mostly as root. Elsewhere a sandbox has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from asyncrl.sandboxes.leftovers import name_of_mine

_ROOT = Path("/sys/fs/cgroup")
_FILES = {"memory": ("memory.max", "memory.limit_in_bytes"), "pids": ("pids.max",)}  # that limit, by controller
_NO_SWAP = {"memory.max": ("memory.swap.max", "0"), "memory.limit_in_bytes": ("memory.memsw.limit_in_bytes", None)}
_EVENTS = ("memory.events", "memory.oom_control")
_ENTER = 'while [ "$1" != -- ]; do echo 0 > "$1/cgroup.procs" || exit; shift; done; shift; exec "$@"'
_MB = 1_000_000
_ROUNDS, _ROUND_S = 200, 0.02  # for the kernel to take away the last process


class ControlGroups:
    """The groups of one sandbox: one for each controller, or one for all."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    @classmethod
    def make(cls, *, memory_mb: int, processes: int) -> ControlGroups:
        """Make groups with limits; without the right to make groups, there are none.

        Raises:
            OSError: a limit cannot be set.
        """
        limits, name = {"memory": memory_mb * _MB, "pids": processes}, name_of_mine()
        folders = {controller: parent / name for controller, parent in group_parents().items()}
        groups = cls([*dict.fromkeys(folders.values())])
        for folder in groups._folders:
            folder.mkdir()
        for controller, folder in folders.items():
            file = next(folder / file for file in _FILES[controller] if (folder / file).exists())
            file.write_text(str(limits[controller]))
            swap, most = _NO_SWAP.get(file.name, ("", None))
            with contextlib.suppress(OSError):  # a machine without accounting of swap
                (folder / swap).write_text(most or str(limits[controller]))
        return groups

    def entering(self) -> list[str]:
        """Return the words before a command that starts in the groups."""
        folders = map(str, self._folders)
        return ["/bin/sh", "-c", _ENTER, "sh", *folders, "--"] if self._folders else []

    def killed(self) -> int:
        """Return how many processes the kernel has killed because the groups had no memory left."""
        counts = 0
        for file in (folder / name for folder in self._folders for name in _EVENTS):
            with contextlib.suppress(OSError):  # of the other version, or without a count
                lines = [line.split() for line in file.read_text().splitlines()]
                counts += sum(int(value) for name, value in lines if name == "oom_kill")
        return counts

    async def end(self) -> None:
        """Kill all processes of the groups, and remove the groups."""
        for _ in range(_ROUNDS):
            self._folders = [folder for folder in self._folders if not end_group(folder)]
            if not self._folders:
                return
            await asyncio.sleep(_ROUND_S)


def end_group(folder: Path) -> bool:
    """Kill the processes of a group, and remove the group; returns whether it is gone."""
    try:
        processes = (folder / "cgroup.procs").read_text().split()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


@cache
def group_parents() -> dict[str, Path]:
    """Return the groups in which this process can make others, by controller; empty unless for all controllers."""
    found = {controller: parent for controller in _FILES if (parent := _parent_of(controller)) is not None}
    return found if len(found) == len(_FILES) else {}


def _parent_of(controller: str) -> Path | None:
    for folder in _candidates(controller):
        probe = folder / name_of_mine()
        with contextlib.suppress(OSError):
            probe.mkdir()
            usable = any(os.access(probe / file, os.W_OK) for file in _FILES[controller])
            probe.rmdir()
            if usable:
                return folder
    return None


def _candidates(controller: str) -> Iterator[Path]:
    """Yield the groups of this process with a controller, and for version 2 also the groups around them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                yield _ROOT / controller / path.lstrip("/")
            elif not names and (_ROOT / "cgroup.controllers").exists():
                inner = _ROOT / path.lstrip("/")
                yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(_ROOT))
