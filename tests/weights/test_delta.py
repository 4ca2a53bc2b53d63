"""Versions as differences to the one before: what is encoded, what is refused, and who gets a full version instead."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from actors.engine.actor import EngineActor
from actors.engine.fetch import Fetcher
from actors.learner.fold import LearnerFold
from actors.runtime.actor import Context
from actors.supervisor.trimmer_fold import TrimmerFold
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from asyncrl.config.weights_settings import WeightsSettings
from asyncrl.training.protocol import NonFiniteWeights
from asyncrl.weights.delta import DeltaRecord, apply_delta, encode
from asyncrl.weights.delta_policy import Costs
from asyncrl.weights.directories import CheckpointError
from asyncrl.weights.tensors import first_not_finite
from asyncrl.weights.verify import TornVersion, check_version
from harness.disks import leave_free, small_disk
from harness.stage import Stage, until
from harness.versions import Answers, Copies, Versions
from topics.engines import EngineReady
from topics.topic import ENGINES, TRAINING
from topics.weights import WEIGHTS_PUBLISHED, WEIGHTS_REFUSED, WeightsPublished, WeightsRefused


@pytest.fixture(params=["files", "stream"])
def context(request, bus: Bus, stage: Callable[..., Stage]) -> Context:
    return stage(weights={"store": request.param, "delta": "always"}).context("engine", bus)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_late_engine_makes_the_newest_version_of_one_full_version_and_the_differences_after_it(
    bus: Bus, context: Context, dtype: str
):
    learner, fetcher = Versions(bus, context, dtype), Fetcher(bus, context.files)
    published = []
    for version, share in enumerate((0.0, 0.01, 0.0001, 0.3)):
        learner.weights.nudge(share, version)
        published.append(await learner.publish())
    for message in published:
        fetcher.check(message)
        fetcher.note(message)

    directory = await fetcher.directory(published[-1])

    assert [bool(message.base) for message in published] == [False, True, True, True]
    assert published[2].bytes < published[1].bytes < published[0].bytes / 10
    full = await learner.publish(full=True)
    fetcher.note(full)
    expected = await fetcher.directory(full)
    assert (directory / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    assert full.digest == published[-1].digest
    fetcher.close()


def flip(content: bytearray) -> None:
    content[len(content) // 2] ^= 1


def cut(content: bytearray) -> None:
    del content[-5:]


@pytest.mark.parametrize("spoil", [flip, cut])
@pytest.mark.parametrize("context", ["files"], indirect=True)
async def test_a_damaged_difference_is_refused_and_the_base_stays_usable(bus: Bus, context: Context, spoil):
    learner, fetcher = Versions(bus, context), Fetcher(bus, context.files)
    base = await learner.publish()
    learner.weights.nudge(0.01, 1)
    delta = await learner.publish()
    fetcher.note(base)
    fetcher.note(delta)
    before = {path.name: path.read_bytes() for path in Path(base.location).iterdir()}
    path = Path(delta.location) / "delta.bin"
    content = bytearray(path.read_bytes())
    spoil(content)
    path.write_bytes(content)

    with pytest.raises(TornVersion, match=r"damaged|ends before it"):
        await fetcher.directory(delta)

    assert {path.name: path.read_bytes() for path in Path(base.location).iterdir()} == before
    assert not list(context.files.fetched.glob("*/lineage*"))


@pytest.mark.parametrize("context", ["files"], indirect=True)
async def test_a_difference_to_another_base_or_of_another_run_is_refused(bus: Bus, context: Context, tmp_path: Path):
    learner, fetcher = Versions(bus, context), Fetcher(bus, context.files)
    first = await learner.publish()
    learner.weights.nudge(0.01, 1)
    second = await learner.publish()
    learner.weights.nudge(0.01, 2)
    third = await learner.publish()

    fetcher.note(third)
    with pytest.raises(TornVersion, match=f"a difference to version {second.key}, which is not known here"):
        await fetcher.directory(third)
    for run, base, words in ((bus.run, first.key, "has base"), ("other", second.key, "has run")):
        target = tmp_path / run
        target.mkdir()
        with pytest.raises(TornVersion, match=words):
            expected = DeltaRecord(run, base, third.key, [])
            apply_delta(Path(third.location), Path(first.location), target, expected=expected)
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    with pytest.raises(TornVersion, match="differ from its manifest"):
        expected = DeltaRecord(bus.run, second.key, third.key, [])
        apply_delta(Path(third.location), Path(first.location), wrong, expected=expected)


CRASHING = """
import os, sys
from pathlib import Path
from asyncrl.weights import delta
delta.check_version = lambda *_: os.kill(os.getpid(), 9)
from asyncrl.weights.directories import written_aside
source, base, target = map(Path, sys.argv[1:4])
with written_aside(target, synced=False) as aside:
    delta.apply_delta(source, base, aside.path, expected=delta.DeltaRecord(*sys.argv[4:7], []))
"""


@pytest.mark.parametrize("context", ["files"], indirect=True)
async def test_an_engine_killed_while_it_applies_a_difference_leaves_the_base_and_no_half_version(
    bus: Bus, context: Context
):
    learner, fetcher = Versions(bus, context), Fetcher(bus, context.files)
    base = await learner.publish()
    learner.weights.nudge(0.01, 1)
    delta = await learner.publish()
    content = (Path(base.location) / "model.safetensors").read_bytes()
    folder = fetcher._folder
    target = folder / f"lineage0-v000001-{delta.digest[:12]}"
    words = [delta.location, base.location, str(target), bus.run, base.key, delta.key]
    killed = subprocess.run([sys.executable, "-c", CRASHING, *words], check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL

    assert [path for path in folder.iterdir() if path.name.endswith(".partial")]
    assert not target.exists()
    assert (Path(base.location) / "model.safetensors").read_bytes() == content
    fetcher.note(base)
    fetcher.note(delta)
    assert await fetcher.directory(delta) == target
    assert not [path for path in folder.iterdir() if path.name.endswith(".partial")], "the half is swept"
    fetcher.close()


def test_what_is_encoded_is_the_smaller_form_and_nothing_where_nothing_changed():
    weights = Copies()
    before = weights.files()
    assert encode(before, weights.files()).tensors == []

    weights.arrays["a"][17] += 1
    sparse = encode(before, weights.files())
    assert [(one.name, one.encoding, one.changed) for one in sparse.tensors] == [("a", "overwrite", 1)]
    weights.nudge(0.5, 1)
    assert {one.encoding for one in encode(before, weights.files()).tensors} == {"xor"}
    with pytest.raises(ValueError, match="other tensors"):
        encode({"model": before["model"][:1]}, weights.files())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_weights_that_are_no_numbers_are_no_version(bus: Bus, context: Context, value: float, dtype: str):
    learner = Versions(bus, context, dtype)
    assert first_not_finite(learner.weights.files()) == ""
    learner.weights.arrays["b"][3] = value

    with pytest.raises(NonFiniteWeights, match="version 0: tensor b holds values that are not finite"):
        await learner.publish()

    assert not list(context.files.weights.glob("*"))


async def test_a_version_with_the_weights_of_another_one_is_that_ones_directory_and_nothing_is_fetched(
    bus: Bus, context: Context, monkeypatch: pytest.MonkeyPatch
):
    learner, fetcher = Versions(bus, context), Fetcher(bus, context.files)
    for number in (0, 2):  # a full version, and a difference to it
        learner.weights.nudge(0.01, number)
        stored = await learner.publish()
        same = WeightsPublished(0, number + 1, stored.digest, stored.store, stored.location, stored.key)
        fetcher.check(same)
        fetcher.note(stored)
        fetcher.note(same)
        directory = await fetcher.directory(stored)

        with monkeypatch.context() as patched:
            patched.delattr(Fetcher, "_make")
            assert await fetcher.directory(same) == directory
    fetcher.close()


def published(version: int, base: str = "", **seconds: float) -> WeightsPublished:
    return WeightsPublished(0, version, f"d{version}", "files", f"/w/lineage0-v{version:06d}-d", base=base, **seconds)


def ready(engine: str, *, delta: bool, seconds: float) -> EngineReady:
    return EngineReady(engine, "http://e", 0, 0, "d", 1, update_s=0.1, delta=delta, fetch_s=seconds)


def test_a_difference_is_used_when_encoding_moving_and_applying_took_less_than_a_full_version():
    costs = Costs()
    assert costs.full_because() == "no full one was measured"
    costs.add_published(published(0, write_s=1.0))
    assert costs.full_because() == "", "it is tried once"
    costs.add_loaded(ready("engine-1", delta=False, seconds=0.5))
    costs.add_published(published(1, base="0:0:d0", encode_s=0.4, write_s=0.1))
    costs.add_loaded(ready("engine-1", delta=True, seconds=0.2))
    assert costs.of(True) == pytest.approx(0.8)
    assert costs.full_because() == ""
    costs.add_loaded(ready("engine-2", delta=True, seconds=5.0))  # the slowest one decides
    assert costs.full_because() == ("a difference took 5.600 s until the slowest engine had it, a full version 1.600 s")
    for version in range(2, 66):
        costs.add_published(published(version, write_s=1.0))
    assert costs.full_because() == "", "it is tried again"


class Log:
    """Feeds folds with messages."""

    def __init__(self, *folds) -> None:
        self._folds = folds
        self.sequence = 0

    def add(self, topic, stream, message) -> None:
        self.sequence += 1
        record = Record(stream, self.sequence, topic.name, {}, b"", self.sequence)
        for fold in self._folds:
            fold.apply(topic, message, record)


def test_after_a_refusal_a_new_lineage_or_many_differences_the_next_version_is_full_and_the_reason_is_told():
    fold = LearnerFold(Config())
    log, settings = Log(fold), WeightsSettings(delta="always", full_every=3)
    assert fold.full_because(settings, 0) == "the first of its lineage"
    for version, base, why in (
        (0, "", ""),
        (1, "0:0:d0", ""),
        (2, "0:1:d1", "2 differences came before it"),
        (3, "", ""),
    ):
        log.add(WEIGHTS_PUBLISHED, TRAINING, published(version, base))
        assert fold.full_because(settings, 0) == why
        assert fold.state.newest == f"0:{version}:d{version}"
    assert fold.state.full == 4
    assert fold.full_because(settings, 1) == "the first of its lineage"
    refused = WeightsRefused("engine-1", 0, 3, 4, "torn")
    fold.apply(WEIGHTS_REFUSED, refused, Record(ENGINES, 1, WEIGHTS_REFUSED.name, {}, b"", 1))
    assert fold.unanswered == 4
    assert fold.full_because(settings, 0) == "an engine refused the one before"
    log.add(WEIGHTS_PUBLISHED, TRAINING, published(4, "0:3:d3"))
    assert fold.unanswered == 0
    assert fold.full_because(settings, 0) == "an engine refused the one before", "it stands on what was refused"
    log.add(WEIGHTS_PUBLISHED, TRAINING, published(5))
    assert fold.full_because(settings, 0) == ""
    measured = dict(fold.state.costs.since)
    log.add(WEIGHTS_PUBLISHED, TRAINING, WeightsPublished(0, 6, "d5", "files", "/w/lineage0-v000005-d", "0:5:d5"))
    assert (fold.state.newest, fold.state.chained) == ("0:5:d5", 0), "what comes next differs from what has bytes"
    assert fold.state.costs.since == measured, "that it took no time says nothing of differences"


def test_what_a_kept_version_is_a_difference_to_is_kept_too():
    fold = TrimmerFold(Config())
    log = Log(fold)
    for version in range(12):
        base = f"0:{version - 1}:d{version - 1}" if version % 5 else ""
        log.add(WEIGHTS_PUBLISHED, TRAINING, published(version, base))
    kept = fold.versions()

    assert kept is not None
    versions = sorted(int(name.split("-")[1][1:]) for name in kept.names)
    assert versions == [5, 6, 7, 8, 9, 10, 11]  # the newest four, and what 8 and 9 are made of
    assert os.path.basename(published(8).location) in kept.names


@pytest.mark.parametrize("context", ["files"], indirect=True)
async def test_an_engine_that_misses_a_fifth_of_the_announcements_arrives_at_the_newest_version(
    bus: Bus, context: Context, monkeypatch: pytest.MonkeyPatch
):
    """A difference behind one that it missed is refused; the newest one, behind which nothing comes, it looks for."""
    context.config.engine.kind, context.config.supervision.silence_s = "scripted", 1.0
    monkeypatch.setattr("actors.engine.actor._NEWS_S", 0.1)  # no newer version comes
    learner, take, missed, last = Versions(bus, context), EngineActor._on_published, list[int](), 19

    def drops(actor, topic, message, record):
        """Miss every fifth version for good, and the last one once."""
        if message.version % 5 == 4 and (message.version != last or message.version not in missed):
            missed.append(message.version)
        else:
            take(actor, topic, message, record)

    monkeypatch.setattr(EngineActor, "_on_published", drops)
    async with Answers(bus) as answers:
        playing = asyncio.create_task(EngineActor(context).run())
        for version in range(last + 1):
            learner.weights.nudge(0.01, version)
            sequence = await learner.announce(await learner.publish(full=version == 0))
            if version % 5 == 0 and version:
                refused = [sequence]
                await until(lambda at=refused: [one.sequence for one in answers.refused()[-1:]] == at, "it refuses it")
                await learner.announce(await learner.publish(again=True), answers=sequence)
            if version % 5 != 4 or version == last:
                await until(lambda number=version: answers.ready()[-1:] == [number], "it has the version")
        context.stop.set()
        await playing

    assert {*missed} == {4, 9, 14, 19}
    assert [refused.version for refused in answers.refused()] == [5, 10, 15]
    assert all("which is not known here" in refused.reason for refused in answers.refused())
    assert answers.ready() == [version for version in range(last + 1) if version not in (4, 9, 14)]


async def test_an_engine_that_follows_makes_each_version_of_the_one_it_has(
    bus: Bus, context: Context, monkeypatch: pytest.MonkeyPatch
):
    learner, fetcher, made = Versions(bus, context), Fetcher(bus, context.files), list[str]()
    make = Fetcher._make

    async def making(self: Fetcher, published: WeightsPublished, base: Path | None, target: Path) -> None:
        made.append(published.key)
        await make(self, published, base, target)

    monkeypatch.setattr(Fetcher, "_make", making)
    keys = []
    for version in range(6):
        learner.weights.nudge(0.01, version)
        message = await learner.publish()
        keys.append(message.key)
        fetcher.note(message)
        fetcher.release(keep=await fetcher.directory(message))

    assert made == (keys if context.config.weights.store == "stream" else keys[1:])
    fetcher.close()


async def test_what_a_killed_engine_left_and_what_none_uses_goes_before_the_next_version_is_made(
    bus: Bus, context: Context
):
    learner, fetcher = Versions(bus, context), Fetcher(bus, context.files)
    messages = []
    for version in range(2):
        learner.weights.nudge(0.01, version)
        messages.append(await learner.publish())
        fetcher.note(messages[-1])
    first = await fetcher.directory(messages[1])
    left = [first.parent / name for name in (".read-1", ".lineage0-v000009-d.1.partial", "lineage0-v000009-d")]
    for path in left:
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    learner.weights.nudge(0.01, 2)
    messages.append(await learner.publish())
    fetcher.note(messages[-1])

    await fetcher.directory(messages[2])

    assert not [path for path in left if path.exists()]
    assert first.exists(), "it is in use"
    fetcher.close()


@pytest.mark.parametrize("context", ["files"], indirect=True)
@pytest.mark.parametrize("share", [1.0, 0.01])
async def test_a_full_disk_of_the_store_is_an_error_that_leaves_nothing_half_written(
    bus: Bus, context: Context, share: float
):
    learner, folder = Versions(bus, context), context.files.weights
    with small_disk(folder, 1):
        await learner.publish()
        before = sorted(path.name for path in folder.rglob("*"))
        leave_free(folder, 0)
        learner.weights.nudge(share, 1)
        with pytest.raises(CheckpointError, match=r"could not be written: the disk is full"):
            await learner.publish()
        (folder / "filler").unlink()
        assert sorted(path.name for path in folder.rglob("*")) == before
        whole = await learner.publish(full=True)
        check_version(Path(whole.location), whole.digest)
