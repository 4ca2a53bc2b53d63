"""Stream sizes: from the settings, the needs of each stream, and the room on the disk; applied when a run starts or
resumes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from asyncrl.background import on_daemon_thread
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import ServerFull
from asyncrl.bus.layout import layout_of
from asyncrl.bus.merged_reader import newest_message
from asyncrl.bus.provision import held_bytes, provision
from asyncrl.config.finding import Finding
from asyncrl.config.process_settings import NatsSettings
from asyncrl.config.settings import Config, ModelSettings
from asyncrl.config.stream_capacity import (
    CHECKPOINT_SHARE,
    MB,
    RESERVE_MB,
    Progress,
    StreamNeed,
    created_parameters,
    files_bytes,
    needs,
    needs_of_the_rest,
    payload_room,
)
from asyncrl.config.tasks import largest_group, rows_of, warmup_rows
from asyncrl.data.model_dir import ModelError, count_parameters, model_info
from asyncrl.data.row_maker import RowMakerDown, sample_rows
from asyncrl.data.sources import RowSetup
from asyncrl.environments.protocol import DataError
from asyncrl.errors import LaunchError
from asyncrl.files import disk_usage
from asyncrl.run.user_actors import run_tables
from topics.batches import BATCH_TRAINED
from topics.topic import DEAD, HISTORY, TRAINING, TRAJECTORIES, TURNS, Retention, Stream

_ON_DISK = 1.2  # bytes on the disk for one that the server counts
_SAMPLED_ROWS = 500
_SAMPLED_S = 1.0  # some sources take a second for a row
_SETTINGS = {Retention.LEDGER: "nats.ledger_max_mb", Retention.PAYLOAD: "nats.stream_max_mb"}
_SHOWN = 4  # streams that a message names


class Disk(NamedTuple):
    """The location of a run's own server and its files. Bytes."""

    folder: Path
    free: int  # or taken by the run itself already
    files: int  # for weights and checkpoints
    room: int  # for all streams together


@dataclasses.dataclass(frozen=True)
class Plan:
    """The room that each stream of a run needs, and its size."""

    config: Config
    row_bytes: float  # of a row of the data, on average
    needs: dict[str, StreamNeed]
    disk: Disk | None = None  # None: the server is external
    room: int | None = None  # bytes for all streams together, if known
    before: dict[str, int] = dataclasses.field(default_factory=dict)  # sizes of the streams of a resumed run

    @property
    def least(self) -> int:
        """Bytes that all streams need together."""
        return sum(need.least for need in self._stored)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes that each stream may hold, by name.

        If the settings leave a size open it is ample, or, with too little room, at the same fraction between least and
        ample for all such streams.
        """
        wish = sum(need.ample for need in self._stored) - self.least
        share = 1.0 if self.room is None else min(1.0, max(0.0, (self.room - self.least) / wish))
        return {
            name: self._given(need.stream)
            or self._kept(need)
            or need.least + math.floor(share * (need.ample - need.least))
            for name, need in self.needs.items()
        }

    def shortages(self) -> Iterator[Finding]:
        """Return why a run with these settings cannot reach its end."""
        for keep, besides in (
            (Retention.LEDGER, ("learner.steps",)),
            (Retention.PAYLOAD, ("buffer.max_lag", "buffer.batch_groups", "rollout.group_size")),
        ):
            key, short = _SETTINGS[keep], [need for need in self._stored if need.stream.keep is keep]
            short = [need for need in short if 0 < self._given(need.stream) < need.least]
            if short:
                given, most = self._given(short[0].stream), max(need.least for need in short)
                message = (
                    f"{given // MB:,} MB are too little: the run needs {_listed(short)}. Set {key} to "
                    f"{math.ceil(most / MB):,} or more, or to 0, which sizes each stream by itself"
                )
                yield Finding((key, *besides), f"{message}{self._fewer(short, given)} ({self._per_step})")
        if self.disk is not None and self.room is not None and self.least > self.room:
            message = (
                f"the run needs {_mb(self.least)} MB and there is room for {self.room // MB:,} in {self.disk.folder} "
                f"({self._disk_text(self.disk)}): {_listed(self._stored)}. Free space, name another directory, "
                f"{'lower gateway.turns_mb, ' if self.config.gateway.count else ''}or set "
            )
            limit = ("nats.disk_max_mb",) if self.config.nats.disk_max_mb else ()
            yield Finding(
                (*limit, "directory", "learner.steps"),
                f"{message}learner.steps to what fits{self._fewer(self._stored, self.room)} ({self._per_step})",
            )

    @property
    def advice(self) -> str:
        """Return advice for an external server with too little room."""
        fewer = self._fewer(self._stored, self.room or 0)
        return (
            f"the run needs {_mb(self.least)} MB: {_listed(self._stored)}. Make room there, or lower "
            f"nats.stream_max_mb, nats.ledger_max_mb (0 sizes each stream by itself) or learner.steps{fewer}"
        )

    def hints(self) -> Iterator[str]:
        """Return the effects of scarce room on the run, short of a stall."""
        config, need, size = self.config, self.needs[TRAJECTORIES.name], self.sizes[TRAJECTORIES.name]
        keeps = config.nats.keep == "run"
        wanted = need.longest * config.learner.steps if keeps else payload_room(config, self.row_bytes).full
        if wanted <= CHECKPOINT_SHARE * size:
            return
        most = math.ceil(wanted / CHECKPOINT_SHARE / MB)
        text = f"{_mb(wanted)} MB if trajectories are as long as they may be; nats.stream_max_mb = {most:,} has room"
        if keeps:
            yield f'nats.keep = "run" may fill the stream before the end: {config.learner.steps} batches are {text}'
        else:
            kept = config.learner.kept_steps
            yield f"checkpoints may come early: open work and {kept} batches between those that are kept are {text}"

    def table(self) -> str:
        """Each stream with its need, its limit, and the step at which it would be full."""
        lines = [f"{'stream':<14}{'needs MB':>10}{'holds MB':>10}  {'setting':<24}full"]
        for name, size in self.sizes.items():
            need = self.needs[name]
            setting = "gateway.turns_mb" if need.stream is TURNS else _SETTINGS.get(need.stream.keep, "")
            given = f"{setting} = {self._given(need.stream) // MB}" if setting else ""
            lines.append(f"{name:<14}{_mb(need.least):>10}{_mb(size):>10}  {given:<24}{self._full(need, size)}")
        return "\n".join(lines)

    def line(self) -> str:
        """Return the needs of all streams on the disk, their limits, and the available room."""
        held = sum(self.sizes[need.stream.name] for need in self._stored)
        text = f"streams need {_mb(self.least)} MB and may hold {_mb(held)}"
        if self.disk is None:
            return f"{text}, which no other stream may reserve on the server at {self.config.nats.url}"
        room, folder = f"{(self.room or 0) // MB:,}", self.disk.folder
        return f"{text}; there is room for {room} MB in {folder} ({self._disk_text(self.disk)})"

    @property
    def _stored(self) -> list[StreamNeed]:
        """Of streams that lie on a disk."""
        return [need for need in self.needs.values() if need.stream.keep is not Retention.LAST]

    def _given(self, stream: Stream) -> int:
        """Bytes that the settings give a stream; 0 if they leave it open."""
        nats, gateway = self.config.nats, self.config.gateway
        if stream is TURNS:
            return MB * gateway.turns_mb if gateway.count else 0
        given = {Retention.LEDGER: nats.ledger_max_mb, Retention.PAYLOAD: nats.stream_max_mb}
        return MB * given.get(stream.keep, 0)

    def _kept(self, need: StreamNeed) -> int:
        """Return the current size of a stream on an external server if it suffices; the server may refuse others."""
        before = self.before.get(need.stream.name, 0)
        return before if self.disk is None and before >= need.least else 0

    def _full(self, need: StreamNeed, size: int) -> str:
        config = self.config
        if need.stream in (DEAD, HISTORY):
            return "never: the oldest messages make room"
        if need.stream is TURNS:
            return "then turns are answered and not recorded" if config.gateway.count else "never: no gateway"
        if need.longest:
            return f"after step {size // need.longest:,}, if every trajectory were as long as it may be"
        if not need.step:
            keeps = {Retention.LEDGER: "never by training", Retention.PAYLOAD: "never: purged after checkpoints"}
            return keeps.get(need.stream.keep, "never: in memory, one message for each actor")
        steps = config.learner.steps + (size - need.least) // need.step
        return f"after step {steps:,} (of {config.learner.steps:,})"

    def _fewer(self, short: list[StreamNeed], given: int) -> str:
        """Return the number of steps that would fit, if any."""
        steps = self.config.learner.steps
        if len(short) == len(self._stored):
            fits = steps - math.ceil((self.least - given) / max(1, sum(need.step for need in short)))
        else:
            fits = min(steps - math.ceil((need.least - given) / max(1, need.step)) for need in short)
        return f"; learner.steps = {fits:,} would fit" if self.config.start.step < fits < steps else ""

    @property
    def _per_step(self) -> str:
        steps, members = self.config.learner.steps, self.config.buffer.batch_groups * largest_group(self.config)
        return f"{steps:,} steps of {members:,} trajectories; a row of the data has {self.row_bytes:,.0f} B"

    def _disk_text(self, disk: Disk) -> str:
        limit = self.config.nats.disk_max_mb
        asked = f"nats.disk_max_mb = {limit:,}, " if limit else ""
        return (
            f"{asked}{disk.free // MB:,} MB free, of which {RESERVE_MB} stay free and {_mb(disk.files)} are for weights"
        )


def plan(config: Config, base: Path, *, root: Path | None = None, progress: Progress | None = None) -> Plan:
    """Return what the streams of a run need and may hold.

    Args:
        root: directory of an existing run; its used space counts as free.
        progress: of a resumed run.

    Raises:
        DataError, OSError: its data cannot be read.
    """
    setups = [rows_of(config, base), warmup_rows(config, base)]
    row_bytes = max(_row_bytes(msgspec.json.encode(one)) for one in setups if one is not None)
    parameters = _parameters(config.model, base)
    streams = run_tables(config, base).streams
    needed = needs(config, row_bytes, parameters, _route_bytes(config, base), streams)
    if progress is not None:
        needed = needs_of_the_rest(needed, progress)
    wanted, files = Path(config.directory).resolve(), files_bytes(config, parameters)
    disk = None if config.nats.url else _disk(config.nats, wanted, root, files)
    room = disk.room if disk is not None else None
    return Plan(config, row_bytes, needed, disk, room, progress.sizes if progress is not None else {})


def _disk(nats: NatsSettings, directory: Path, root: Path | None, files: int) -> Disk:
    folder = root or next(path for path in (directory, *directory.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free + (disk_usage(root) if root is not None else 0)
    room = min(nats.disk_max_mb * MB or free, free - RESERVE_MB * MB - files)
    return Disk(folder, free, files, math.floor(max(0, room) / _ON_DISK / nats.servers))


def _route_bytes(config: Config, base: Path) -> int:
    """Bytes of the experts of a token, if they are stored; a made model has none."""
    if config.learner.routing != "replay" or not config.model.path:
        return 0
    try:
        return model_info(base / config.model.path).route_bytes
    except ModelError:
        return 0  # as below


def _parameters(model: ModelSettings, base: Path) -> int:
    if not model.path:
        return created_parameters(model.create)
    try:
        return count_parameters(base / model.path)
    except ModelError:
        return 0  # named where the model itself is checked


@lru_cache(maxsize=8)
def _row_bytes(encoded: bytes) -> float:
    """Bytes of a row on average, over the first rows of the seeded order that can be made within a second."""
    setup = msgspec.json.decode(encoded, type=RowSetup)
    try:
        _, rows = asyncio.run(sample_rows(setup, _SAMPLED_ROWS, _SAMPLED_S))
    except RowMakerDown as error:
        raise DataError(str(error)) from error
    return sum(len(msgspec.msgpack.encode(row)) for row in rows) / len(rows)


def _listed(short: list[StreamNeed]) -> str:
    """Streams with their needs, the greatest first."""
    most = sorted(short, key=lambda need: -need.least)
    text = ", ".join(f"{need.stream.name} {_mb(need.least)} MB" for need in most[:_SHOWN])
    return f"{text} and {len(most) - _SHOWN} more" if len(most) > _SHOWN else text


def _mb(size: float) -> str:
    return f"{math.ceil(size / MB):,}"


async def provision_sized(bus: Bus, config: Config, base: Path, root: Path) -> dict[str, int]:
    """Make or change the streams of a run so that it can reach its end.

    Args:
        root: the run's directory.

    Returns:
        Bytes that each stream may hold, by name.

    Raises:
        LaunchError: the settings, the disk or the server leave it too little room, or its data cannot be read.
        BusError: the streams could not be made.
    """
    progress = await _progress(bus, config)
    try:
        planned = await on_daemon_thread(plan, config, base, root=root, progress=progress)
    except (DataError, OSError) as error:
        raise LaunchError(f"task.source: {error}") from error
    short = [f"{finding.keys[0]}: {finding.message}" for finding in planned.shortages()]
    if short:
        raise LaunchError("; ".join(short))
    try:
        return await _provisioned(bus, planned)
    except ServerFull as error:
        planned = dataclasses.replace(planned, room=error.room)
    try:
        return await _provisioned(bus, planned)
    except ServerFull as error:
        raise LaunchError(f"{error}; {planned.advice}") from error


async def _provisioned(bus: Bus, planned: Plan) -> dict[str, int]:
    sizes, config = planned.sizes, planned.config
    await provision(bus, sizes, lease_s=config.workers.lease_s, layout=layout_of(config.nats))
    return sizes


async def _progress(bus: Bus, config: Config) -> Progress | None:
    held = await held_bytes(bus)
    if not held:
        return None
    newest = await newest_message(bus, BATCH_TRAINED) if TRAINING.name in held else None
    step = newest[0].step if newest is not None else config.origin
    return Progress(
        {name: stream.stored for name, stream in held.items()},
        {name: stream.most for name, stream in held.items()},
        step - config.origin,
        config.learner.steps - step,
        step < config.start.step,
    )
