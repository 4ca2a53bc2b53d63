"""Child processes on this machine."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.process_settings import PlacementKind
from asyncrl.config.settings import Config
from asyncrl.process import ChildProcess, python
from asyncrl.run.directory import RunFiles
from asyncrl.run.placement import Job


class LocalProcesses:
    """Child processes of this one, on this machine."""

    away_s = 0.0  # it needs no other host

    def __init__(self, logs: Path) -> None:
        self._logs = logs  # folder with one file per name

    async def start(self, job: Job) -> ChildProcess:
        """Start a child process, with one thread for numerics unless its environment sets another number."""
        words = (*job.words, "--credentials", str(job.credentials)) if job.credentials is not None else job.words
        return await ChildProcess.start(
            python("-m", job.module, *words),
            log=self.log(job.name),
            environment={"OMP_NUM_THREADS": "1", **job.environment},
            apart=job.apart,
            inherits=job.inherits,
        )

    def here(self, _job: Job) -> bool:
        """See `Placement`: all do."""
        return True

    def log(self, name: str) -> Path:
        """The file that holds what the processes of this name printed."""
        return self._logs / f"{name}.log"


def open_placement(_config: Config, files: RunFiles) -> LocalProcesses:
    """Place processes on this machine, with their logs in the run's folder."""
    return LocalProcesses(files.logs)


KIND = PlacementKind("asyncrl.run.placements.local:open_placement", one_machine=True)
