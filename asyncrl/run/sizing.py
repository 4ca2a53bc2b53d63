"""Limits of streams: checked against the settings, the data and the disk, applied when a run starts or resumes."""

from __future__ import annotations

import asyncio
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
from asyncrl.bus.provision import UNLIMITED, equal_sizes, held_bytes, provision
from asyncrl.config.finding import Finding
from asyncrl.config.settings import Config, ModelSettings
from asyncrl.config.stream_capacity import (
    CHECKPOINT_SHARE,
    MB,
    RESERVE_MB,
    Needs,
    counted,
    created_parameters,
    needs,
    store_limit,
)
from asyncrl.config.tasks import largest_group, rows_of, warmup_rows
from asyncrl.data.model_dir import ModelError, count_parameters, model_info
from asyncrl.data.row_maker import RowMakerDown, sample_rows
from asyncrl.data.sources import RowSetup
from asyncrl.environments.protocol import DataError
from asyncrl.errors import LaunchError
from asyncrl.files import disk_usage
from topics.topic import BLOBS, DEAD, HISTORY, TRAJECTORIES, TURNS, WEIGHTS, Retention

_RINGS = {DEAD: 64, HISTORY: 16}  # MB; when they are full, the oldest messages make room
_SAMPLED_ROWS = 500
_SAMPLED_S = 1.0  # some sources take a second for a row


class Plan(NamedTuple):
    """The room that a run needs, and that its disk has."""

    config: Config
    row_bytes: float  # of a row of the data, on average
    needs: Needs
    folder: Path | None = None  # of the disk; None: the server is external
    free: int = 0  # bytes on that disk, or taken by the run itself already

    @property
    def room(self) -> float:
        """Bytes for all streams together."""
        if self.folder is None:
            return math.inf
        nats, free = self.config.nats, self.free - RESERVE_MB * MB - self.needs.files
        return counted(min(nats.disk_max_mb * MB or free, free), nats)

    @property
    def payload_limit(self) -> int:
        """Bytes that each stream of tokens may hold: as given, or at most a quarter of the room."""
        given, need = self.config.nats.stream_max_mb * MB, self.needs
        if given or self.config.nats.keep == "run":
            return given or UNLIMITED
        return math.floor(max(need.tokens, min(need.ample, (self.room - need.logs) / 4)))

    def shortages(self, log: int = 0) -> Iterator[Finding]:
        """Return why a run with these settings cannot reach its end.

        Args:
            log: bytes that the largest log of a resumed run holds.
        """
        nats, need = self.config.nats, self.needs
        largest = max(need.log, log + need.step)
        for key, most, stream, others in (
            ("nats.ledger_max_mb", largest, "the largest log", ("learner.steps",)),
            ("nats.stream_max_mb", need.tokens, "tokens", ("buffer.max_lag", "buffer.batch_groups")),
        ):
            given = nats.ledger_max_mb if key == "nats.ledger_max_mb" else nats.stream_max_mb
            if 0 < given * MB < most:
                message = f"{given} MB are too little: the run needs {_mb(most)} MB for {stream}. Set {key} to"
                yield Finding((key, *others), f"{message} {_mb(most)} or more, or to 0 ({self._per_step})")
        if need.streams > self.room:
            limit = ("nats.disk_max_mb",) if nats.disk_max_mb else ()
            steps = self.config.learner.steps - math.ceil((need.streams - self.room) / need.step)
            fewer = f"; learner.steps = {steps:,} would fit" if steps > self.config.start.step else ""
            message = f"the run needs {self._needed}, and {self._on_disk}. Free space, name another directory, or set"
            yield Finding(
                (*limit, "directory", "learner.steps"),
                f"{message} learner.steps to what fits{fewer} ({self._per_step})",
            )

    def hints(self) -> Iterator[str]:
        """Return the effects of scarce room on the run, short of a stall."""
        limit, keeps = self.payload_limit, self.config.nats.keep == "run"
        wanted = self.needs.tokens_made if keeps else self.needs.tokens_kept
        if wanted <= CHECKPOINT_SHARE * (self.room if limit == UNLIMITED else limit):
            return
        text = f"{_mb(wanted)} MB if trajectories are as long as they may be"
        if keeps:
            yield f'nats.keep = "run" may fill the disk before the end: all batches are {text}'
        else:
            yield (
                f"checkpoints may come early: open work and {self.config.learner.kept_steps} batches between those "
                f"that are kept are {text}; nats.stream_max_mb = {_mb(wanted / CHECKPOINT_SHARE)} has room"
            )

    def line(self) -> str:
        """Return the needs of all streams, their limits, and the available room."""
        limit = self.payload_limit
        holds = "no limit" if limit == UNLIMITED else f"at most {_mb(limit)} MB"
        where = f"on the server at {self.config.nats.url}" if self.folder is None else f"; {self._on_disk}"
        return f"streams need {self._needed} (each stream of tokens: {holds}){where}"

    @property
    def _needed(self) -> str:
        return f"{_mb(self.needs.streams)} MB: {_mb(self.needs.logs)} for logs, {_mb(self.needs.tokens)} for tokens"

    @property
    def _per_step(self) -> str:
        steps, members = self.config.learner.steps, self.config.buffer.batch_groups * largest_group(self.config)
        return f"{steps:,} steps of {members:,} trajectories; a row of the data has {self.row_bytes:,.0f} B"

    @property
    def _on_disk(self) -> str:
        limit = self.config.nats.disk_max_mb
        asked = f"nats.disk_max_mb = {limit:,}, " if limit else ""
        return (
            f"there is room for {self.room // MB:,.0f} MB in {self.folder} ({asked}{self.free // MB:,} MB free, of "
            f"which {RESERVE_MB} stay free and {_mb(self.needs.files)} are for weights)"
        )


def plan(config: Config, base: Path, *, root: Path | None = None) -> Plan:
    """Return what the streams of a run need and may hold.

    Args:
        root: directory of an existing run; its used space counts as free.

    Raises:
        DataError, OSError: its data cannot be read.
    """
    setups = [rows_of(config, base), warmup_rows(config, base)]
    row_bytes = max(_row_bytes(msgspec.json.encode(one)) for one in setups if one is not None)
    needed = needs(config, row_bytes, _parameters(config.model, base), _route_bytes(config, base))
    if config.nats.url:
        return Plan(config, row_bytes, needed)
    wanted = Path(config.directory).resolve()
    folder = root or next(path for path in (wanted, *wanted.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free + (disk_usage(root) if root is not None else 0)
    return Plan(config, row_bytes, needed, folder, free)


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


def _mb(size: float) -> str:
    return f"{math.ceil(size / MB):,}"


async def provision_sized(bus: Bus, config: Config, base: Path, root: Path) -> dict[str, int]:
    """Make the streams of a run, or change their limits.

    Args:
        root: the run's directory.

    Returns:
        Bytes that each stream may hold, by name.

    Raises:
        LaunchError: the settings or the disk leave the run too little room, or its data cannot be read.
        ServerFull: an external server has no room for the streams of tokens.
        BusError: the streams could not be made.
    """
    held = await held_bytes(bus)
    logs = [one.name for one in bus.tables.streams if one.keep is Retention.LEDGER and one not in (*_RINGS, TURNS)]
    try:
        planned = await on_daemon_thread(plan, config, base, root=root)
    except (DataError, OSError) as error:
        raise LaunchError(f"task.source: {error}") from error
    short = planned.shortages(max((held[name].stored for name in logs if name in held), default=0))
    if words := [f"{finding.keys[0]}: {finding.message}" for finding in short]:
        raise LaunchError("; ".join(words))
    limit, least = planned.payload_limit, planned.needs.tokens
    before = held[TRAJECTORIES.name].most if TRAJECTORIES.name in held else 0
    if config.nats.url and not config.nats.stream_max_mb and before >= least:
        limit = before  # a server whose disk became smaller may refuse another limit
    try:
        return await _provisioned(bus, config, limit)
    except ServerFull:
        if config.nats.stream_max_mb or limit <= least:
            raise
    return await _provisioned(bus, config, least)


async def _provisioned(bus: Bus, config: Config, payload: int) -> dict[str, int]:
    """Give the streams their limits.

    Args:
        payload: bytes that each stream of tokens may hold.
    """
    turns = config.gateway.turns_mb if config.gateway.count else 1
    sizes = equal_sizes(payload_mb=1, ledger_mb=config.nats.ledger_max_mb or UNLIMITED, tables=bus.tables)
    sizes |= {TRAJECTORIES.name: payload, BLOBS.name: payload, WEIGHTS.name: UNLIMITED, TURNS.name: turns * MB}
    most = store_limit(config.nats) // 8 or math.inf
    sizes |= {stream.name: math.floor(min(size * MB, most)) for stream, size in _RINGS.items()}
    await provision(bus, sizes, lease_s=config.workers.lease_s, layout=layout_of(config.nats))
    return sizes
