"""Published weights: a small message, a manifest beside the bytes, and engines that read the newest version alone."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from safetensors.torch import load_file

from actors.engine.actor import EngineActor
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import WRITER, publish
from asyncrl.training.init_model import ModelShape, create_model
from asyncrl.training.torch.trainer import TorchTrainer
from asyncrl.weights import versions
from asyncrl.weights.files.store import FileStore
from harness.stage import Stage, until
from harness.versions import empty_version
from topics.weights import WeightsPublished
from topics.wire import encode


@pytest.fixture
def trainer(tmp_path: Path) -> TorchTrainer:
    create_model(tmp_path / "model", alphabet="abc=", seed=0, shape=ModelShape(hidden=32, head_dim=16, ffn=64))
    return TorchTrainer(tmp_path / "model")


def write(store: FileStore, trainer: TorchTrainer) -> WeightsPublished:
    return versions.publish(store, trainer.copy_weights().files(), trainer.source, lineage=0, version=3)


def test_a_version_is_identified_by_its_digest_and_its_tensors_lie_in_the_manifest(
    trainer: TorchTrainer, tmp_path: Path
):
    message = write(FileStore(tmp_path / "weights"), trainer)

    directory = Path(message.location)
    manifest = (directory / "manifest.jsonl").read_bytes()
    records = [json.loads(line) for line in manifest.splitlines()]
    tensors = load_file(directory / "model.safetensors")
    assert len(encode(message)) < 300 + len(message.location)
    assert message.digest == xxhash.xxh3_128_hexdigest(manifest)
    assert sorted(tensors) == [record["name"] for record in records]
    for record in records:
        tensor = tensors[record["name"]]
        assert (record["dtype"], record["shape"]) == ("float32", list(tensor.shape))
        assert record["digest"] == xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes())
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [directory.name]


@pytest.mark.parametrize("torn", ["model.safetensors", "manifest.jsonl"])
def test_a_version_that_is_there_is_kept_and_one_that_is_torn_is_written_anew(
    trainer: TorchTrainer, tmp_path: Path, torn: str
):
    store = FileStore(tmp_path / "weights")
    first = write(store, trainer)
    file = Path(first.location) / torn
    content, node = file.read_bytes(), file.stat().st_ino

    assert write(store, trainer) == first
    assert file.stat().st_ino == node
    os.truncate(file, len(content) - 1)
    assert write(store, trainer) == first

    assert file.read_bytes() == content


async def test_an_engine_that_starts_reads_the_newest_version_alone(bus: Bus, stage: Callable[..., Stage], monkeypatch):
    context = stage(engine={"kind": "scripted"}).context("engine", bus)
    await asyncio.gather(*(announce(context, bus, version) for version in range(200)))
    await announce(context, bus, 200)
    read: list[int] = []
    take = EngineActor._on_published
    monkeypatch.setattr(
        EngineActor, "_on_published", lambda self, *output: (read.append(output[1].version), take(self, *output))
    )
    playing = asyncio.create_task(EngineActor(context).run())

    await until(lambda: context.vitals.get("version") == 200, "it has the newest")
    await announce(context, bus, 201)
    await until(lambda: context.vitals.get("version") == 201, "it follows")

    assert read == [200, 201]
    context.stop.set()
    await playing


async def announce(context, bus: Bus, version: int) -> int:
    message = await asyncio.to_thread(empty_version, context.files, version)
    return await publish(bus, message, headers={WRITER: "test"})
