"""Whatever the index of a version in the store `stream` says, and wherever a chunk wants to lie: torn, or taken."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from actors.engine.fetch import Fetcher
from asyncrl.bus.chunks import ChunkLog
from asyncrl.bus.connection import Bus
from asyncrl.weights.stream.store import FILE, OFFSET, Assembly, StreamIndex
from asyncrl.weights.verify import TornVersion
from harness.stage import Stage
from topics.weights import WEIGHTS_STORED, WeightsPublished

INDEX = msgspec.msgpack.encode(StreamIndex({"model.safetensors": 1}, 1))


@pytest.mark.parametrize(
    "index",
    [
        INDEX.replace(b"model", b"\xff\xfe\xfd\xfc\xfb"),
        INDEX.replace(b"model", b"a/../"),
        INDEX.replace(b"model", b"/etc/"),
        INDEX[:-1],
        b"",
        msgspec.msgpack.encode(StreamIndex({"model.safetensors": -1}, 1)),
        msgspec.msgpack.encode(StreamIndex({"model.safetensors": 2**62}, 1)),
        msgspec.msgpack.encode(StreamIndex({}, -1)),
    ],
)
async def test_an_index_that_is_none_of_a_version_makes_it_a_torn_one(
    bus: Bus, stage: Callable[..., Stage], index: bytes
):
    name = "lineage0-v000001-0123456789abcdef"
    writer = ChunkLog(bus, WEIGHTS_STORED)

    def write() -> None:
        writer.put(name, {FILE: "model.safetensors", OFFSET: "0"}, b"x")
        writer.put(name, {}, index)
        writer.flush()

    await asyncio.to_thread(write)
    files = stage(engine={"kind": "scripted"}, weights={"store": "stream"}).context("engine", bus).files

    with pytest.raises(TornVersion):
        await Fetcher(bus, files).directory(WeightsPublished(0, 1, "d" * 32, "stream", name))

    assert not list(files.fetched.glob("*/lineage*"))


@pytest.mark.parametrize("offset", ["", "-1", "1 ", "²", "٣", "8", "9" * 5000])
def test_a_chunk_at_an_offset_that_is_no_place_in_its_file_is_torn(tmp_path: Path, offset: str):
    assembly = Assembly(tmp_path, StreamIndex({"a.bin": 10}, 1))

    with pytest.raises(TornVersion, match=r"a chunk of 3 bytes at .* has no place"):
        assembly.add({FILE: "a.bin", OFFSET: offset}, b"abc")
