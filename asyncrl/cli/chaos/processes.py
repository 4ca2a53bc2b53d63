"""The processes of one run, found by the environment they inherited: no other process is ever touched."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import psutil

from asyncrl.cli.chaos.targets import SERVER
from asyncrl.crash import CRASH_FOLDER


class Part(NamedTuple):
    """A living process and its role in the run."""

    role: str  # as in `targets.ROLES`
    name: str  # "rollout-2", "nats", "nats-3", "up"
    process: psutil.Process


def parts(crash_folder: Path) -> list[Part]:
    """Every living process that inherited this crash folder and has a role."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or belongs to another user
            if process.environ().get(CRASH_FOLDER) != str(crash_folder) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            part = _part(process, process.cmdline())
            if part is not None:
                found.append(part)
    return sorted(found, key=lambda part: part.name)


def _part(process: psutil.Process, words: list[str]) -> Part | None:
    if "actors.main" in words:
        role, name = words[words.index("actors.main") + 1 :][:2]
        return Part(role, name, process)
    if words and Path(words[0]).name == "nats-server":
        folder = Path(words[words.index("-c") + 1]).parent.name  # of a cluster: "nats-2"
        return Part("nats", folder if folder.startswith("nats-") else "nats", process)
    if "asyncrl.engine.embedded" in words or "sglang.launch_server" in words:
        return Part(SERVER, SERVER, process)
    if "asyncrl.cli.main" in words and "up" in words:
        return Part("up", "up", process)
    return None
