"""The retention of live traffic: data keys of days that are too old are erased."""

from __future__ import annotations

import asyncio
import time

from actors.runtime.actor import Context
from asyncrl.bus.errors import BusError
from asyncrl.live.owners import day_of
from asyncrl.run.purge import purge, purge_spools

_DAY_S = 86_400
_POLL_S = 600.0  # between two looks


async def retain(context: Context) -> None:
    """Erase what is too old, again and again until it is cancelled."""
    days = context.config.live.retention_days
    while days:
        before = day_of(time.time() - days * _DAY_S)
        try:
            purged = await purge(context.bus, "", before, "retention")
            context.count("keys_erased", len(purged.keys))
            purge_spools(context.files.spool, "", before)
        except (BusError, TimeoutError, OSError) as error:  # asked again
            context.log.warning("retention waits", reason=str(error))
        await asyncio.sleep(_POLL_S)  # a day passes by the clock alone
