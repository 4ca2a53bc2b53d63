"""Erasing data keys of live traffic: nothing that was sealed under them can be read again."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Literal, NamedTuple

from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusRefused
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import publish
from asyncrl.live.owners import covers
from asyncrl.live.spool import Spool, SpoolTaken
from topics.secrets import SECRET_MADE, PurgeRequested
from topics.topic import SECRETS

_SILENT_S = 30.0
_NO_MESSAGE = 10057  # there is none of this sequence (any more)


class Purged(NamedTuple):
    """The outcome of a purge."""

    keys: list[str]  # data keys that it erased
    left: int  # of all others


async def purge(bus: Bus, owner: str, before: str, reason: Literal["operator", "retention"]) -> Purged:
    """Erase the data keys of an owner, of days before another; a repeat goes on where one was cut short.

    What is to be erased is stored first, so that open work ends; then each key is overwritten on the disk (NATS calls
    this a secure delete) and read nowhere again.

    Args:
        owner: as `asyncrl.live.owners.covers` takes it; "": all.
        before: a day as `day_of` gives it; "": all.

    Raises:
        BusError: the server does not answer, or does not let this login erase.
    """
    found = await _stored(bus)
    chosen = {secret: at for secret, at in found.items() if covers(secret, owner, before)}
    if chosen or reason == "operator":  # keys that wait in a gateway's spool are not there yet
        request = PurgeRequested(secrets.token_hex(8), owner, before, reason, sorted(chosen))
        await publish(bus, request)
    for sequence in [at for ats in chosen.values() for at in ats]:
        await _erase(bus, sequence)
    return Purged(sorted(chosen), len(found) - len(chosen))


def purge_spools(folder: Path, owner: str, before: str) -> int:
    """Overwrite the same in what waits for gateways that do not run; those that do read of the purge.

    Args:
        folder: of the spools.

    Returns:
        The number of messages and keys that were erased.

    Raises:
        OSError: a file cannot be written.
    """
    erased = 0
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        spool = Spool(path)
        with contextlib.suppress(SpoolTaken), contextlib.closing(spool):
            spool.open()
            erased += spool.erase(lambda waiting: any(covers(one, owner, before) for one in waiting.secrets))
    return erased


async def _erase(bus: Bus, sequence: int) -> None:
    call = f"STREAM.MSG.DELETE.{SECRETS.full_name(bus.run)}"
    try:
        await bus.api(call, {"seq": sequence, "no_erase": False})
    except BusRefused as error:
        if error.code != _NO_MESSAGE:
            raise


async def _stored(bus: Bus) -> dict[str, list[int]]:
    """Return the data keys that are there, with the sequences of their messages."""
    found: dict[str, list[int]] = {}

    def take(record: Record) -> None:
        found.setdefault(record.key, []).append(record.sequence)

    reader = LogReader(bus, SECRETS, take, subjects=[SECRET_MADE.pattern(bus.run)], headers_only=True)
    await reader.start()
    try:
        await reader.wait(lambda: False, _SILENT_S)
    finally:
        await reader.close()
    return found
