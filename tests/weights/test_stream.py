"""Weights through the NATS server, for hosts that share no folder: chunks of a version, and the files made of them."""

import asyncio
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from actors.engine.actor import EngineActor
from actors.engine.fetch import Fetcher
from actors.runtime.actor import Context
from actors.supervisor.sweeper import purge_versions
from asyncrl.bus import chunks
from asyncrl.bus.chunks import ChunkLog
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import LogReader, last_sequence, read_last
from asyncrl.bus.provision import stream_states
from asyncrl.bus.publish import WRITER, publish
from asyncrl.weights import versions
from asyncrl.weights.directories import CheckpointError
from asyncrl.weights.files.store import FileStore
from asyncrl.weights.stream.store import FILE, OFFSET, Assembly, StreamIndex, StreamStore
from asyncrl.weights.tensors import HostTensor
from asyncrl.weights.verify import TornVersion
from harness.stage import DEADLINE_S, Stage, until
from topics.engines import ENGINE_READY, EngineReady
from topics.topic import ENGINES, WEIGHTS
from topics.weights import WEIGHTS_REFUSED, WEIGHTS_STORED, WeightsPublished, WeightsRefused
from topics.wire import decode

PARTS = [("big", 300_000), ("small", 3), ("empty", 0), ("other", 70_000)]


def tensors(seed: int) -> dict[str, list[HostTensor]]:
    rng = np.random.default_rng(seed)
    arrays = [(name, rng.standard_normal(size).astype(np.float32)) for name, size in PARTS]
    held = [HostTensor(name, "float32", [len(array)], array.view(np.uint8)) for name, array in arrays]
    return {"model": held}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Configuration and tokenizer of a model."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "tokenizer.json").write_bytes(os.urandom(200_000))
    return folder


@pytest.fixture
def context(bus: Bus, stage: Callable[..., Stage], monkeypatch) -> Context:
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 65_536)
    return stage(engine={"kind": "scripted"}, weights={"store": "stream"}).context("engine", bus)


async def stored(bus: Bus, version: int, model: Path | None = None) -> WeightsPublished:
    store = StreamStore(ChunkLog(bus, WEIGHTS_STORED))
    return await asyncio.to_thread(versions.publish, store, tensors(version), model, lineage=0, version=version)


async def announce(bus: Bus, message: WeightsPublished) -> int:
    return await publish(bus, message, headers={WRITER: "learner"})


async def forget_a_chunk(bus: Bus, version: WeightsPublished) -> None:
    """Delete one chunk from the middle of a version."""
    last = await read_last(bus, WEIGHTS_STORED, version.location)
    assert last is not None
    body = {"seq": last.sequence - 10, "no_erase": True}
    await bus.api(f"STREAM.MSG.DELETE.{WEIGHTS.full_name(bus.run)}", body)


async def test_a_version_arrives_as_the_same_files_that_the_other_store_writes(
    bus: Bus, context: Context, model: Path, tmp_path: Path
):
    written = versions.publish(FileStore(tmp_path / "files"), tensors(7), model, lineage=0, version=7)

    published = await stored(bus, 7, model)
    directory = await Fetcher(bus, context.files).directory(published)

    assert published.key == written.key
    assert published.store == "stream"
    expected = {path.name: path.read_bytes() for path in Path(written.location).iterdir()}
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == expected
    assert await last_sequence(bus, WEIGHTS) > 25


async def test_a_version_that_was_fetched_ahead_is_there_at_once_and_one_that_is_torn_is_refused_when_it_is_asked_for(
    bus: Bus, context: Context, monkeypatch: pytest.MonkeyPatch
):
    fetcher, first, torn = Fetcher(bus, context.files), await stored(bus, 1), await stored(bus, 2)
    await forget_a_chunk(bus, torn)

    await fetcher.ahead(None, DEADLINE_S)
    await fetcher.ahead(first, DEADLINE_S)
    with monkeypatch.context() as patched:
        patched.setattr("actors.engine.fetch.check_version", None)  # nothing is read again
        directory = await fetcher.directory(first)
    await fetcher.ahead(torn, DEADLINE_S)

    assert (directory / "model.safetensors").exists()
    with pytest.raises(TornVersion):
        await fetcher.directory(torn)


async def test_engines_of_one_host_fetch_a_version_once_and_what_none_of_them_uses_goes(bus: Bus, context: Context):
    one, other = Fetcher(bus, context.files), Fetcher(bus, context.files)
    first, second = await stored(bus, 1), await stored(bus, 2)

    old, same = await asyncio.gather(one.directory(first), other.directory(first))
    node = (old / "model.safetensors").stat().st_ino
    new = await one.directory(second)
    one.release(keep=new)
    kept = old.exists()
    await other.directory(second)
    other.release(keep=new)

    assert old == same
    assert kept, "the other engine still had it"
    assert not old.exists()
    assert (new / "model.safetensors").stat().st_ino != node
    one.close()
    other.close()


async def test_what_another_engine_fetched_is_fetched_anew_where_its_bytes_are_others_by_now(
    bus: Bus, context: Context
):
    one, other, version = Fetcher(bus, context.files), Fetcher(bus, context.files), await stored(bus, 1)
    file = await one.directory(version) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    assert (await other.directory(version) / "model.safetensors").read_bytes() == content

    assert await one.directory(version) == file.parent
    one.close()
    other.close()


async def test_a_version_without_one_of_its_chunks_is_refused_and_taken_when_it_is_there_once_more(
    bus: Bus, context: Context
):
    refusals: list[WeightsRefused] = []
    ready: list[EngineReady] = []
    readers = [
        LogReader(
            bus,
            ENGINES,
            lambda r: refusals.append(decode(WeightsRefused, r.data)),
            subjects=[WEIGHTS_REFUSED.pattern(bus.run)],
        ),
        LogReader(
            bus, ENGINES, lambda r: ready.append(decode(EngineReady, r.data)), subjects=[ENGINE_READY.pattern(bus.run)]
        ),
    ]
    for reader in readers:
        await reader.start()
    good, torn = await stored(bus, 1), await stored(bus, 2)
    await forget_a_chunk(bus, torn)
    await announce(bus, good)
    playing = asyncio.create_task(EngineActor(context).run())
    await until(lambda: [one.version for one in ready] == [1], "it is ready")

    sequence = await announce(bus, torn)
    await until(lambda: len(refusals) == 1, "it refuses")
    assert (refusals[0].version, refusals[0].sequence) == (2, sequence)
    assert "1 of 26 chunks are missing" in refusals[0].reason
    assert [one.version for one in ready] == [1], "it goes on with what it has"
    again = await stored(bus, 2)
    again.answers = sequence
    await announce(bus, again)

    await until(lambda: [one.key for one in ready] == [good.key, torn.key], "it has the version")
    assert ready[-1].fetch_s > 0
    context.stop.set()
    await playing
    for reader in readers:
        await reader.close()


async def test_a_version_with_a_flipped_byte_is_refused_and_leaves_nothing(bus: Bus, context: Context, monkeypatch):
    put = ChunkLog.put

    def flip(writer: ChunkLog, name: str, headers: dict[str, str], body: bytes) -> None:
        changed = headers.get(FILE) == "model.safetensors" and headers[OFFSET] != "0"
        put(writer, name, headers, bytes([body[0] ^ 1]) + body[1:] if changed else body)

    monkeypatch.setattr(ChunkLog, "put", flip)
    torn = await stored(bus, 1)

    with pytest.raises(TornVersion, match="tensors differ from its manifest"):
        await Fetcher(bus, context.files).directory(torn)

    assert not [path for path in context.files.fetched.rglob("*") if path.is_dir() and "lineage" in path.name]


async def test_what_was_not_published_is_refused(bus: Bus, context: Context):
    fetcher, published = Fetcher(bus, context.files), await stored(bus, 1)
    other = await stored(bus, 2)
    other.digest = published.digest
    never = WeightsPublished(0, 3, "d" * 32, "stream", f"lineage0-v000003-{'0' * 16}")

    with pytest.raises(TornVersion, match="its manifest has digest"):
        await fetcher.directory(other)
    with pytest.raises(TornVersion, match="is not, or not wholly, in the stream"):
        await fetcher.directory(never)

    folder = context.files.fetched
    assert not [path for path in folder.rglob("*") if path.is_dir() and "lineage" in path.name]


async def test_a_full_stream_is_an_error_of_the_publication_that_names_the_stream(bus: Bus, context: Context):
    config = (await bus.api(f"STREAM.INFO.{WEIGHTS.full_name(bus.run)}"))["config"]
    await bus.api(f"STREAM.UPDATE.{WEIGHTS.full_name(bus.run)}", {**config, "max_bytes": 500_000})
    bus.publish_deadline_s = 2.0  # a loaded server still answers within it

    with pytest.raises(CheckpointError, match=r"version 1 could not be stored: .*maximum bytes exceeded"):
        await stored(bus, 1)


async def test_every_writer_of_a_full_stream_ends_with_its_error(bus: Bus, context: Context):
    config = (await bus.api(f"STREAM.INFO.{WEIGHTS.full_name(bus.run)}"))["config"]
    await bus.api(f"STREAM.UPDATE.{WEIGHTS.full_name(bus.run)}", {**config, "max_bytes": 1_000})
    bus.publish_deadline_s = 2.0  # a loaded server still answers within it
    writer = ChunkLog(bus, WEIGHTS_STORED)

    errors: list[BusError] = []

    def write(number: int) -> None:
        try:
            for chunk in range(1000):
                writer.put("lineage0-v000001-0", {"file": str(number), "offset": str(chunk)}, bytes(10_000))
        except BusError as error:
            errors.append(error)

    for number in range(16):  # more than there are chunks under way at once
        threading.Thread(target=write, args=[number], daemon=True).start()
    await until(lambda: len(errors) == 16, "an error of each")

    assert all("maximum bytes exceeded" in str(error) for error in errors)


async def test_versions_that_are_not_kept_are_purged_but_for_the_newest_which_may_be_written_once_more(
    bus: Bus, context: Context
):
    versions = [await stored(bus, version) for version in range(4)]
    before = (await stream_states(bus, [WEIGHTS]))["WEIGHTS"]["messages"]

    purged = await purge_versions(bus, {versions[1].location}, (0, 3))

    assert purged == 2
    assert (await stream_states(bus, [WEIGHTS]))["WEIGHTS"]["messages"] == before // 2
    for version in (versions[1], versions[3]):
        await Fetcher(bus, context.files).directory(version)


def test_a_chunk_that_the_disk_takes_a_part_of_is_an_error_of_the_disk(tmp_path: Path):
    assembly, limits = Assembly(tmp_path, StreamIndex({"a.bin": 2**17}, 1)), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            assembly.add({FILE: "a.bin", OFFSET: "0"}, bytes(2**17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
