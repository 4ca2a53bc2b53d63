"""Reading logs to their end."""

import asyncio

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record


async def read_all(bus: Bus, stream, **options) -> list[Record]:
    records: list[Record] = []
    reader = LogReader(bus, stream, records.append, **options)
    await reader.start()
    await asyncio.wait_for(reader.caught_up.wait(), 120)
    await reader.close()
    return records
