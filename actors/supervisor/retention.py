"""The retention of live traffic: data keys of days that are too old are erased, by a clock that can be believed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from actors.runtime.actor import Context
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import server_time_ns, stream_info
from asyncrl.files import write_json
from asyncrl.live.tenant_keys import day_of
from asyncrl.run.purge import purge, purge_spools
from asyncrl.state.live_facts import AHEAD
from topics.topic import SECRETS

_DAY_S = 86_400.0
_POLL_S = 600.0  # between two looks
_APART_S = 3600.0  # at most, between a clock's reading and its expected reading
_SETTLED_S = _DAY_S  # for which a clock has to advance evenly after a jump


class _Seen(msgspec.Struct):
    """A trusted wall time, and the reading of the monotonic clock at that moment."""

    wall_s: float
    steady_s: float  # since the machine was started, times in which it slept included
    boot: str = ""  # of the machine, since which that clock counts


class Clock:
    """The time that decides which data is erased; a jump forward of the clock is not trusted at once.

    The wall clock is compared with the server's clock and with a monotonic clock. A file has the time that was trusted
    last, so that a restarted process does not take the time after a jump for its first one.
    """

    def __init__(
        self, path: Path, *, wall: Callable[[], float], steady: Callable[[], float], boot: Callable[[], str]
    ) -> None:
        self._path = path
        self.wall = wall  # seconds since 1970
        self._steady = steady  # of a clock that only counts, since the machine was started
        self._boot = boot  # identifies this start of the machine
        self._believed: _Seen | None = None
        self._jumped: _Seen | None = None  # the first reading after a jump
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            self._believed = msgspec.json.decode(path.read_bytes(), type=_Seen)

    def ahead_s(self, server_s: float) -> float:
        """Read the clocks; returns by how many seconds the wall clock is ahead of the trusted time, 0 if it can be
        trusted.

        Args:
            server_s: of the server's clock, seconds since 1970.
        """
        now, believed = _Seen(self.wall(), self._steady(), self._boot()), self._believed
        if abs(now.wall_s - server_s) > _APART_S:
            return now.wall_s - server_s
        ahead_s = 0.0 if believed is None else _ahead_s(now, believed)
        if ahead_s > _APART_S:
            if self._jumped is None or abs(_ahead_s(now, self._jumped)) > _APART_S:
                self._jumped = now
            if now.steady_s - self._jumped.steady_s < _SETTLED_S:
                return ahead_s
        self._jumped, self._believed = None, now
        write_json(self._path, now)
        return 0.0


def _ahead_s(now: _Seen, then: _Seen) -> float:
    """Return how much more the wall clock advanced than the monotonic clock; after a reboot the elapsed time is
    unknown, and counts as 0."""
    passed_s = now.steady_s - then.steady_s if now.boot == then.boot else 0.0
    return now.wall_s - then.wall_s - passed_s


def clock_of(path: Path) -> Clock:
    """Return the clock of this machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    steady = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    return Clock(path, wall=time.time, steady=steady, boot=lambda: boot.read_text(encoding="utf-8").strip())


async def retain(context: Context) -> None:
    """Erase data beyond the retention period, again and again until it is cancelled."""
    days = context.config.live.retention_days
    clock = clock_of(context.files.clock)
    while days:
        try:
            await _look(context, clock, days)
        except (BusError, TimeoutError, OSError) as error:  # asked again
            context.log.warning("retention waits", reason=str(error))
        await asyncio.sleep(_POLL_S)  # a day passes by the clock alone


async def _look(context: Context, clock: Clock, days: int) -> None:
    """Erase data beyond the retention period, if the clock can be trusted."""
    server_s = server_time_ns((await stream_info(context.bus, SECRETS))["ts"]) / 1e9
    context.vitals[AHEAD] = ahead_s = clock.ahead_s(server_s)
    if ahead_s:
        context.log.error("nothing is erased: the clock jumped", ahead_s=round(ahead_s))
        return
    before = day_of(clock.wall() - days * _DAY_S)
    purged = await purge(context.bus, "", before, "retention")
    context.count("keys_erased", len(purged.keys))
    purge_spools(context.files.spool, "", before)
