"""Weights that are torn, late, or have no room, and engines that die or are slow: the others never wait."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from actors.engine.actor import EngineActor
from actors.engine.fetch import Fetcher
from actors.runtime.actor import ActorDown, Context
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.crash import CRASH_FOLDER, arm
from asyncrl.weights.delta import DeltaRecord
from harness.disks import leave_free, small_disk
from harness.sglang_like import like_sglang
from harness.stage import DEADLINE_S, Stage, until
from harness.versions import Answers, Versions
from topics.topic import WEIGHTS
from topics.weights import WEIGHTS_STORED, WeightsPublished


def staged(stage: Callable[..., Stage], store: str = "files", **tables: object) -> Stage:
    settings = {"engine": {"kind": "scripted"}, "weights": {"store": store, "delta": "always"}}
    return stage(**(settings | {"supervision": {"silence_s": 1.0}} | tables))


@asynccontextmanager
async def playing(context: Context) -> AsyncIterator[asyncio.Task[None]]:
    """An engine actor inside this process."""
    task = asyncio.create_task(EngineActor(context).run())
    yield task
    context.stop.set()
    await asyncio.gather(task, return_exceptions=True)


def flip_in(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


async def flip(_bus: Bus, message: WeightsPublished) -> None:
    flip_in(Path(message.location) / "delta.bin")


async def name_another(_bus: Bus, message: WeightsPublished, **fields: str) -> None:
    path = Path(message.location) / "delta.json"
    record = msgspec.json.decode(path.read_bytes(), type=DeltaRecord)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, **fields)))


async def name_another_run(bus: Bus, message: WeightsPublished) -> None:
    await name_another(bus, message, run="other")


async def name_another_base(bus: Bus, message: WeightsPublished) -> None:
    await name_another(bus, message, base="0:7:d")


async def empty(_bus: Bus, message: WeightsPublished) -> None:
    """As if nothing had changed."""
    path = Path(message.location)
    record = msgspec.json.decode((path / "delta.json").read_bytes(), type=DeltaRecord)
    (path / "delta.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(record, tensors=[])))
    (path / "delta.bin").write_bytes(b"")


async def remove_the_base(_bus: Bus, message: WeightsPublished) -> None:
    for other in Path(message.location).parent.glob("lineage*"):
        if other != Path(message.location):
            shutil.rmtree(other)


async def forget_a_chunk(bus: Bus, message: WeightsPublished) -> None:
    last = await read_last(bus, WEIGHTS_STORED, message.location)
    assert last is not None
    await bus.api(f"STREAM.MSG.DELETE.{WEIGHTS.full_name(bus.run)}", {"seq": last.sequence - 1, "no_erase": True})


@pytest.mark.parametrize(
    ("store", "spoil", "reason"),
    [
        ("files", flip, "is damaged"),
        ("files", name_another_run, "has run 'other'"),
        ("files", name_another_base, "has base '0:7:d'"),
        ("files", empty, "tensors differ from its manifest"),
        ("files", remove_the_base, "which is not there any more"),
        ("stream", forget_a_chunk, "chunks are missing"),
    ],
)
async def test_a_difference_that_is_not_what_it_must_be_is_refused_and_answered_with_the_full_version(
    bus: Bus, stage: Callable[..., Stage], store: str, spoil, reason: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("actors.engine.actor._NEWS_S", 0.1)  # no newer version comes
    context = staged(stage, store).context("engine", bus)
    learner = Versions(bus, context)
    await learner.announce(await learner.publish())
    async with Answers(bus) as answers, playing(context):
        await until(lambda: answers.ready() == [0], "it has the first version")
        learner.weights.nudge(0.01, 1)
        delta = await learner.publish()
        await spoil(bus, delta)
        sequence = await learner.announce(delta)
        await until(lambda: bool(answers.refused()), "it refuses the difference")
        again = await learner.publish(again=True)
        await learner.announce(again, answers=sequence)
        await until(lambda: answers.ready() == [0, 1], "it has the full version")

    [refused] = answers.refused()
    assert (refused.version, refused.sequence) == (1, sequence)
    assert reason in refused.reason
    assert (delta.base != "", again.base, again.key) == (True, "", delta.key)


@pytest.mark.parametrize("spoil", [flip_in, lambda path: os.truncate(path, 100_000), Path.unlink])
async def test_a_full_version_whose_bytes_are_others_reaches_no_server_and_is_written_once_more(
    bus: Bus, stage: Callable[..., Stage], spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("actors.engine.actor._NEWS_S", 0.1)  # no newer version comes
    async with like_sglang() as server, Answers(bus) as answers:
        context = staged(stage, engine={"kind": "external", "addresses": [server.address]}).context("engine", bus)
        learner = Versions(bus, context)
        first = await learner.publish()
        await learner.announce(first)
        async with playing(context):
            await until(lambda: answers.ready() == [0], "it has the first version")
            learner.weights.nudge(0.01, 1)
            torn = await learner.publish(full=True)
            spoil(Path(torn.location) / "model.safetensors")
            sequence = await learner.announce(torn)
            await until(lambda: bool(answers.refused()), "it refuses the version")
            assert (server.loads, server.paused) == ([first.key], False), "it samples on"
            await learner.announce(await learner.publish(again=True), answers=sequence)
            await until(lambda: answers.ready() == [0, 1], "it has what was written once more")

    [refused] = answers.refused()
    assert (refused.version, refused.sequence) == (1, sequence)
    assert server.loads == [first.key, torn.key]


@pytest.mark.parametrize("store", ["files", "stream"])
async def test_an_engine_that_joins_reads_one_full_version_and_the_differences_after_it(
    bus: Bus, stage: Callable[..., Stage], store: str, monkeypatch: pytest.MonkeyPatch
):
    context = staged(stage, store).context("engine", bus)
    learner, read = Versions(bus, context), list[tuple[int, bool]]()
    for version in range(8):
        learner.weights.nudge(0.01, version)
        await learner.announce(await learner.publish(full=version == 4))
    take = EngineActor._on_published

    def taking(actor, topic, message, record):
        read.append((message.version, bool(message.base)))
        take(actor, topic, message, record)

    monkeypatch.setattr(EngineActor, "_on_published", taking)
    async with Answers(bus) as answers, playing(context):
        await until(lambda: answers.ready() == [7], "it is ready with the newest alone")
        assert read == [(4, False), (5, True), (6, True), (7, True)]
        await until(lambda: len([*context.files.fetched.glob("*/lineage*")]) == 1, "what it was made of goes")
        learner.weights.nudge(0.01, 8)
        await learner.announce(await learner.publish())
        await until(lambda: answers.ready() == [7, 8], "and follows from there")
    assert not answers.refused()


async def test_a_difference_that_a_full_version_overtakes_is_not_refused(
    bus: Bus, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    """With the full version the engine forgets the base of the difference that it was about to fetch."""
    context = staged(stage).context("engine", bus)
    learner, fetch, note, overtaken = Versions(bus, context), Fetcher.directory, Fetcher.note, asyncio.Event()

    def noting(fetcher: Fetcher, published: WeightsPublished) -> None:
        note(fetcher, published)
        if published.version == 2:
            overtaken.set()

    async def late(fetcher: Fetcher, published: WeightsPublished) -> Path:
        if published.version == 1:
            await learner.announce(await learner.publish(full=True))
            await overtaken.wait()
        return await fetch(fetcher, published)

    monkeypatch.setattr(Fetcher, "note", noting)
    monkeypatch.setattr(Fetcher, "directory", late)
    async with Answers(bus) as answers, playing(context):
        await learner.announce(await learner.publish())
        await until(lambda: answers.ready() == [0], "it has the first version")
        await learner.announce(await learner.publish())
        await until(lambda: answers.ready() == [0, 2], "it has the newest version")
    assert not answers.refused()


@pytest.mark.parametrize("point", ["engine.updating", "engine.paused", "engine.swapped"])
async def test_an_engine_killed_inside_an_update_begins_again_with_the_newest_version(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
):
    monkeypatch.setenv(CRASH_FOLDER, str(tmp_path / "points"))
    engines = staged(stage, "stream")
    learner = Versions(bus, engines.context("engine", bus))
    await learner.announce(await learner.publish())
    async with Answers(bus) as answers:
        killed = await engines.start("engine")
        await until(lambda: answers.ready() == [0], "it is ready")
        arm(tmp_path / "points", point, "engine")
        learner.weights.nudge(0.01, 1)
        await learner.announce(await learner.publish())
        assert await killed.wait() == -signal.SIGKILL
        await engines.start("engine")
        await until(lambda: answers.ready() == [0, 1], "its successor has the newest version")
    assert not answers.refused()


async def test_a_slow_engine_holds_no_other_back_and_goes_on_to_the_newest_version(
    bus: Bus, stage: Callable[..., Stage]
):
    go_on = asyncio.Event()
    async with like_sglang() as one, like_sglang() as other, Answers(bus) as answers:
        engines = staged(stage, engine={"kind": "external", "addresses": [one.address, other.address]})
        contexts = [engines.context("engine", bus) for _ in range(2)]
        contexts[1].actor_id = "engine-2"
        learner = Versions(bus, contexts[0])

        async def hang(key: str) -> str:
            if key.startswith("0:1:"):
                await go_on.wait()
            return ""

        one.refusal = hang
        async with playing(contexts[0]), playing(contexts[1]):
            for version in range(4):
                learner.weights.nudge(0.01, version)
                await learner.announce(await learner.publish())
                await until(lambda version=version: version in answers.ready("engine-2"), f"the other has {version}")
                if version == 0:
                    await until(lambda: answers.ready() == [0], "both begin")
            assert answers.ready() == [0]
            go_on.set()
            await until(lambda: answers.ready()[-1] == 3, "the slow one has the newest")
    assert answers.ready() == [0, 1, 3]


@pytest.mark.parametrize("store", ["files", "stream"])
async def test_an_engine_whose_own_disk_is_full_ends_with_the_reason_and_its_successor_has_the_newest_version(
    bus: Bus, stage: Callable[..., Stage], store: str
):
    engines = staged(stage, store)
    context = engines.context("engine", bus)
    learner = Versions(bus, context)
    with small_disk(context.files.fetched, 1):
        await learner.announce(await learner.publish())
        learner.weights.nudge(0.01, 1)
        await learner.announce(await learner.publish())
        async with Answers(bus) as answers:
            async with playing(context) as task:
                await until(lambda: answers.ready() == [1], "it is ready")
                leave_free(context.files.fetched, 0)
                learner.weights.nudge(0.01, 2)
                await learner.announce(await learner.publish())
                with pytest.raises(ActorDown, match=r"version 2 could not be fetched: .*the disk is full"):
                    await asyncio.wait_for(asyncio.shield(task), DEADLINE_S)
            assert answers.ready() == [1]
            (context.files.fetched / "filler").unlink()
            async with playing(engines.context("engine", bus)):
                await until(lambda: answers.ready() == [1, 2], "there is room again")
    assert not answers.refused()


async def test_a_torn_difference_is_refused_although_newer_ones_keep_coming(bus: Bus, stage: Callable[..., Stage]):
    context = staged(stage).context("engine", bus)
    learner, version = Versions(bus, context), 0
    await learner.announce(await learner.publish())
    async with Answers(bus) as answers, playing(context):
        await until(lambda: answers.ready() == [0], "it has the first version")
        async with asyncio.timeout(DEADLINE_S):
            while not answers.refused():
                learner.weights.nudge(0.01, version := version + 1)
                delta = await learner.publish()
                if version == 1:
                    await flip(bus, delta)
                await learner.announce(delta)
                await asyncio.sleep(0.1)  # a step of the learner
        await learner.announce(await learner.publish(full=True))
        await until(lambda: answers.ready()[-1] == version + 1, "it has the full version")
    assert answers.ready() == [0, version + 1]
