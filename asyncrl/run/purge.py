"""Erasing data keys of live traffic: nothing that was sealed under them can be read again."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusRefused
from asyncrl.bus.log import LogReader, Record, read_message
from asyncrl.bus.publish import publish
from asyncrl.live.spool import Spool, SpoolTaken
from asyncrl.live.tenant_keys import covers, day_of
from topics.secrets import SECRET_MADE, PurgeRequested
from topics.topic import ACTORS, SECRETS

_SILENT_S = 30.0
_NO_MESSAGE = 10057  # no message with this sequence exists (any more)


class Purged(NamedTuple):
    """The outcome of a purge."""

    keys: list[str]  # data keys that it erased
    left: int  # of all others


async def purge(bus: Bus, owner: str, before: str, reason: Literal["operator", "retention"]) -> Purged:
    """Erase the data keys of an owner, of days before a date; a repeat continues an interrupted purge.

    The request is stored first, so that open work ends; then each key is overwritten on the disk (NATS calls this a
    secure delete) and can never be read again.

    Args:
        owner: as `asyncrl.live.tenant_keys.covers` takes it; "": all.
        before: a day as `day_of` gives it; "": all.

    Raises:
        BusError: the server does not answer, or does not let this login erase.
    """
    found = await _stored(bus)

    def covered(secret: str) -> bool:
        # The clock of a gateway may have named an older day than that of the server on which the key was stored.
        stored = "" if reason == "operator" else day_of(found[secret][0].time_ns / 1e9)
        return covers(secret, owner, before) and (not stored or stored < before)

    chosen = [secret for secret in found if covered(secret)]
    erased: list[str] = []
    if chosen or reason == "operator":  # keys that wait in a gateway's spool are not there yet
        asked_ns = await _erase_all(bus, PurgeRequested(secrets.token_hex(8), owner, before, reason, chosen), found)
        erased, found = chosen, await _stored(bus)
        # Keys that came while the first ones were read are of turns that were there before the purge, too.
        stored = [secret for secret, records in found.items() if records[0].time_ns <= asked_ns]
        if chosen := [secret for secret in stored if covered(secret)]:
            await _erase_all(bus, PurgeRequested(secrets.token_hex(8), owner, before, reason, chosen), found)
    return Purged(sorted(erased + chosen), len(found) - len(chosen))


async def _erase_all(bus: Bus, request: PurgeRequested, found: Mapping[str, list[Record]]) -> int:
    """Store the request, and erase its keys; returns when it was stored, ns since 1970."""
    record = await read_message(bus, ACTORS, await publish(bus, request))
    for secret in request.secrets:
        for one in found[secret]:
            await _erase(bus, one.sequence)
    return record.time_ns if record is not None else 0


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


async def _stored(bus: Bus) -> dict[str, list[Record]]:
    """Return the data keys that are there, with their messages."""
    found: dict[str, list[Record]] = {}

    def take(record: Record) -> None:
        found.setdefault(record.key, []).append(record)

    reader = LogReader(bus, SECRETS, take, subjects=[SECRET_MADE.pattern(bus.run)], headers_only=True)
    await reader.start()
    try:
        await reader.wait(lambda: False, _SILENT_S)
    finally:
        await reader.close()
    return found
