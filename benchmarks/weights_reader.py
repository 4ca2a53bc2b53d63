"""A reader of a version, without torch: `python -m benchmarks.weights_reader CREDENTIALS RUN FOLDER VERSION`."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import msgspec
import uvloop

from actors.engine.fetch import Fetcher
from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.run.directory import RunFiles
from topics.weights import WeightsPublished


async def read_once(address: Path, run: str, root: Path, version: WeightsPublished) -> None:
    """Read a version as the engine actor of a host does, once stdin is closed; print its CPU seconds."""
    bus = await Bus.connect(BusAddress.read(address), run)
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    began_s = time.process_time()
    await Fetcher(bus, RunFiles(root)).directory(version)
    print(time.process_time() - began_s, flush=True)
    await bus.close()


if __name__ == "__main__":
    made = msgspec.json.decode(sys.argv[4], type=WeightsPublished)
    uvloop.run(read_once(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), made))
