"""The processes of a run on this machine, found by its directory; no other process is ever touched."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import psutil

SERVER = "engine-server"  # the inference server that an engine started
RANK = "learner-rank"  # a process of the learner's trainer group
NATS = "nats"
_SERVER_MODULES = ("asyncrl.engine.embedded", "sglang.launch_server")


class Part(NamedTuple):
    """A living process and its role in the run."""

    role: str  # of an actor, or one of the above
    name: str  # "rollout-2", "learner-1-rank0", "engine-1-server", "nats", "nats-3"
    process: psutil.Process


def parts(root: Path) -> list[Part]:
    """Return every living process with a role in the run of a directory, but for `asyncrl up`."""
    found, servers = [], []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or belongs to another user
            words = process.cmdline()
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if not set(_SERVER_MODULES).isdisjoint(words):
                servers.append((process, process.ppid()))
            elif (file := _file_of(words)) is not None and file.resolve().is_relative_to(root.resolve()):
                found.append(_part(process, words, file))
    engines = {part.process.pid: part.name for part in found if part.role == "engine"}
    found += [Part(SERVER, f"{engines[parent]}-server", process) for process, parent in servers if parent in engines]
    return sorted(found, key=lambda part: part.name)


def _file_of(words: list[str]) -> Path | None:
    """Return the file in a run's directory that the command line of a process with a role names."""
    option = "-c" if words and Path(words[0]).name == "nats-server" else "--credentials"
    modules = ("actors.main", "actors.learner.rank_process")
    if option not in words[:-1] or (option == "--credentials" and set(modules).isdisjoint(words)):
        return None
    return Path(words[words.index(option) + 1])


def _part(process: psutil.Process, words: list[str], file: Path) -> Part:
    if "actors.main" in words:
        role, name = words[words.index("actors.main") + 1 :][:2]
        return Part(role, name, process)
    if "actors.learner.rank_process" in words:
        learner, rank = words[words.index("actors.learner.rank_process") + 1 :][:2]
        return Part(RANK, f"{learner}-rank{rank}", process)
    folder = file.parent.name  # of a cluster: "nats-2"
    return Part(NATS, folder if folder.startswith("nats-") else NATS, process)
