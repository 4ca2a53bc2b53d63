"""The directory of a run and the places of its files."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from asyncrl.config.engine_settings import Capability, EngineSettings
from asyncrl.config.renamed import read_settings
from asyncrl.config.settings import Config, ModelSettings
from asyncrl.errors import UNREADABLE, DamagedFile
from asyncrl.files import write_private
from asyncrl.locks import try_lock
from asyncrl.telemetry.metric_names import MetricRow

_TAIL_BYTES = 256 * 1024  # of the metrics, in which the newest steps are looked for
READING = "reading"  # file in a run directory that a reader of a run that is over locks
JOINED = "joined"  # the same of those that read through its server


class _Inside:
    """A path inside the directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, files: RunFiles, _owner: type[RunFiles]) -> Path:
        return files.root / self._name


@dataclass
class RunFiles:
    """The directory of a run."""

    config = _Inside("config.json")  # the settings as they were resolved at the start
    address = _Inside("nats.json")  # the owner's login; private
    credentials = _Inside("credentials")  # one file per role: how it reaches the run's topics; private
    logs = _Inside("logs")  # one file per actor
    metrics = _Inside("metrics.jsonl")  # one row for each step and evaluation
    location = _Inside("location")  # holds the absolute path at which it was made: the logs name files by it
    model = _Inside("model")  # the untrained model, where the run made it
    weights = _Inside("weights")  # the weight store
    fetched = _Inside("fetched")  # versions that engines of this host have fetched
    checkpoints = _Inside("checkpoints")  # one directory per checkpoint
    keys = _Inside("keys")  # one file per tenant that the config names: its API key; private
    spool = _Inside("spool")  # one file per gateway: messages to store while the server is unreachable; private
    clock = _Inside("clock.json")  # the time by which data keys were last erased
    report = _Inside("report.html")  # the page with the data of the run, written at its end; private
    profiles = _Inside("profiles")  # traces of steps, samples of stacks, and stacks
    reports = _Inside("reports")  # rows of the summary, as JSON objects of texts, that actors of the user's own leave
    sharing = _Inside("sharing")  # locked by the `asyncrl share` that moves processes to and from the run
    failure = _Inside("failure")  # why the run failed
    own_engine_key = _Inside("engine.key")  # the API key of inference servers that the run starts; private

    root: Path
    start: Path | None = None  # folder that relative paths of the config start from; None: the directory knows it
    sent: bool = False  # this host has only files that were sent to it, with the model

    @property
    def base(self) -> Path:
        """The folder that relative paths of the config start from."""
        return self.start or Path((self.root / "base").read_text(encoding="utf-8"))

    def model_path(self, model: ModelSettings) -> Path:
        """The Hugging Face directory that training starts from."""
        return self.base / model.path if model.path and not self.sent else self.model

    def make_engine_key(self) -> None:
        """Write a new key for the inference servers that the run starts, readable by its owner alone."""
        # Hexadecimal: SGLang reads its options file as a command line, where "-..." would be another option.
        write_private(self.own_engine_key, secrets.token_hex(32).encode())

    def key_of(self, actor_id: str) -> Path:
        """The API key of a server that was announced during the run, or of a router; private."""
        return self.root / f"{actor_id}.key"

    def engine_key_file(self, engine: EngineSettings, engine_id: str) -> Path | None:
        """File with the API key of an inference server: the given one; started servers have their own."""
        group = engine.group_of(engine_id)
        if group.api_key_file:
            return self.base / group.api_key_file
        if group.can(Capability.ADDRESSES):
            announced = self.key_of(engine_id)
            return announced if announced.exists() else None
        return self.own_engine_key if group.can(Capability.PROCESSES) else None

    @property
    def end(self) -> Literal["finished", "stopped", "failed", "crashed", "not begun"]:
        """End of the run, if no `asyncrl up` holds it: one that crashed wrote nothing about its end."""
        if self.failure.exists():
            return "failed"
        summary = self.read_summary()
        if summary:
            return "finished" if summary.get("finished") else "stopped"
        if not self.newest_steps():
            with contextlib.suppress(OSError, DamagedFile):
                if self.read_config().trains:
                    return "not begun"
        return "crashed"

    def read_summary(self) -> dict[str, Any]:
        """Read the record of the end of a run; empty without one."""
        try:
            return msgspec.json.decode((self.root / "summary.json").read_bytes(), type=dict[str, Any])
        except (OSError, *UNREADABLE):
            return {}

    def newest_steps(self) -> list[MetricRow]:
        """Read the newest rows of steps from the metrics, the newest last; empty before the first step."""
        rows: list[MetricRow] = []
        try:
            with self.metrics.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                lines = file.read().splitlines()
        except OSError:
            return rows
        for line in lines:
            with contextlib.suppress(*UNREADABLE):  # the first and the last may be a part of one
                rows.append(MetricRow(msgspec.json.decode(line, type=dict[str, Any])))
        return [row for row in rows if row.get("event") == "step"]

    def read_config(self) -> Config:
        """Read the run's settings.

        Raises:
            OSError, DamagedFile: they are not there, or cannot be read.
        """
        try:
            return read_settings(msgspec.json.decode(self.config.read_bytes(), type=dict[str, Any]))
        except UNREADABLE as error:
            raise DamagedFile(f"{self.config} holds no settings of a run: {error}") from error


def made_at(root: Path) -> Path:
    """Return the path at which a run directory was made; its logs name files by that path."""
    location = root / "location"
    return Path(location.read_text(encoding="utf-8")) if location.exists() else root


def is_locked(directory: Path) -> bool:
    """Return whether a living `asyncrl up` holds a run directory."""
    return is_taken(directory / "lock")


def reader_of(directory: Path) -> str:
    """Return the process that reads the topics of a finished run and started its server; empty if there is none."""
    path = directory / READING
    return (path.read_text(encoding="utf-8") or "another process") if is_taken(path) else ""


def is_taken(path: Path) -> bool:
    """Return whether a living process has locked a file; False if it does not exist."""
    try:
        handle = os.open(path, os.O_RDONLY)  # also without write permission
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two processes that ask at once do not take each other for the holder.
        return not try_lock(handle, shared=True)
    finally:
        os.close(handle)
