"""Versions and checkpoints that several ranks write: those of one rank, and nothing while a share is missing."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from actors.learner.group import RankProcesses
from actors.learner.publication import copied_digest, publish_version, save_checkpoint, step
from actors.learner.rank import Rank
from asyncrl.bus.connection import Bus
from asyncrl.crash import CRASH_FOLDER, arm
from asyncrl.training.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from asyncrl.training.protocol import Trainer
from asyncrl.training.publisher import Publisher
from asyncrl.weights.adapters import digest_of_model
from asyncrl.weights.delta import DeltaRecord, apply_delta
from harness.learning import Playing, pack
from harness.stage import Stage, until
from topics.weights import WeightsPublished

SMALL = {
    "rollout": {"max_new_tokens": 8, "group_size": 2},
    "buffer": {"batch_groups": 1, "max_lag": 1},
    "weights": {"delta": "always"},
}
LEARNER = {"trainer": "torch", "ranks": 2, "lr": 1e-3, "start_s": 300.0}
ALL = ["model-rank0.safetensors", "model-rank1.safetensors"]


@pytest.mark.slow
async def test_what_two_ranks_write_is_what_one_writes_and_either_loads_the_checkpoint_of_the_other(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    stand = stage(**SMALL, learner=LEARNER)
    stand.make_model()
    await stand.open()
    context = stand.context("learner", bus)
    one, other = (Rank(bus, context.config, context.files) for _ in range(2))
    two = RankProcesses(context, lambda: None)
    first, second = [await pack(bus, step) for step in (1, 2)]
    try:
        (alone, shared, again), folders = await handed_on((one, two, other), first)
        await step(two, second)
        await two.ask(Publisher.copy_weights, False)
        delta = await publish_version(two, 1, 2, shared.key)
    finally:
        await two.close()

    assert shared.digest == alone.digest == again.digest
    assert shared.bytes == alone.bytes
    assert [path.name for path in sorted(Path(shared.location).glob("*.safetensors"))] == ALL
    files = [read_checkpoint(folder).files for folder in folders]
    assert files[2] == files[0], "bit for bit, by way of two ranks"
    assert {*ALL, "optimizer-rank0.safetensors", "optimizer-rank1.safetensors"} < files[1].keys()
    target = tmp_path / "applied"
    target.mkdir()
    expected = DeltaRecord(context.config.run, shared.key, delta.key, [])
    apply_delta(Path(delta.location), Path(shared.location), target, expected=expected)
    names = msgspec.json.decode((Path(delta.location) / "delta.json").read_bytes())["files"]
    assert names == ["delta-rank0.bin", "delta-rank1.bin"]
    os.truncate(folders[1] / ALL[1], 100)
    with pytest.raises(CheckpointError, match=r"model-rank1.safetensors: 100 bytes .* this checkpoint is torn"):
        read_checkpoint(folders[1])


@pytest.mark.slow
@pytest.mark.parametrize("store", ["files", "stream"])
async def test_an_adapter_of_two_ranks_is_that_of_one_and_either_loads_the_checkpoint_of_the_other(
    bus: Bus, stage: Callable[..., Stage], store: str
):
    lora = {"rank": 1, "publish": "adapter"}  # of whose low matrices one rank has nothing
    stand = stage(**(SMALL | {"weights": {"store": store}}), learner=LEARNER | {"lora": lora})
    stand.make_model()
    await stand.open()
    context = stand.context("learner", bus)
    one, other = (Rank(bus, context.config, context.files) for _ in range(2))
    two = RankProcesses(context, lambda: None)
    first = await pack(bus, 1)
    try:
        (alone, shared, again), folders = await handed_on((one, two, other), first)
    finally:
        await two.close()

    assert shared.digest == alone.digest == again.digest
    assert shared.adapts == alone.adapts == digest_of_model(context.files.model)
    files = [read_checkpoint(folder).files for folder in folders]
    assert files[2] == files[0], "bit for bit, by way of two ranks"
    adapter = "adapter_model.safetensors"  # one file, as PEFT reads it
    assert files[1][adapter] == files[0][adapter]
    if store == "files":
        assert [path.name for path in Path(shared.location).glob("*.safetensors")] == [adapter]


async def handed_on(groups: Sequence[Rank | RankProcesses], batch: int) -> tuple[list[WeightsPublished], list[Path]]:
    """Versions and checkpoints of groups: the first takes a step, each other one goes on from the one before it."""
    versions: list[WeightsPublished] = []
    folders: list[Path] = []
    for number, group in enumerate(groups):
        await group.open()
        if folders:
            await group.ask(Trainer.load, folders[-1])
        else:
            await step(group, batch)
        version, folder = await written(group, Checkpoint(number, 1, "", batch))
        versions.append(version)
        folders.append(Path(folder))
    return versions, folders


async def written(group: Rank | RankProcesses, checkpoint: Checkpoint) -> tuple[WeightsPublished, str]:
    """The newest weights of a group as a version, and its state as a checkpoint."""
    await group.ask(Publisher.copy_weights, False)
    await group.ask(Publisher.copy_state)
    digest = await copied_digest(group)
    version = await publish_version(group, checkpoint.lineage, checkpoint.step)
    assert version.digest == digest
    return version, await save_checkpoint(group, msgspec.structs.replace(checkpoint, digest=digest))


@pytest.mark.slow
async def test_a_rank_killed_when_its_share_is_written_leaves_nothing_and_the_next_group_writes_it(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(CRASH_FOLDER, str(tmp_path / "crash"))  # read by the ranks, which are processes
    stand = stage(**SMALL, learner=LEARNER | {"checkpoint_every": 1, "publish_every": 2})
    stand.make_model()
    await stand.open()
    version = arm(tmp_path / "crash", "share.written", "learner")
    playing = Playing(stand.context("learner", bus))
    fold, files = playing.learner.fold, stand.files
    try:
        await until(lambda: not version.exists(), "a rank dies with its share of version 0", 300)
        await until(lambda: 0 in fold.state.published, "version 0", 300)
        checkpoint = arm(tmp_path / "crash", "share.written", "learner")
        await pack(bus, 1)
        await until(lambda: not checkpoint.exists(), "a rank dies with its share of checkpoint 1", 300)
        await pack(bus, 2)
        await until(lambda: fold.saved_step == 2, "checkpoint 2", 300)
        published, saved = dict(fold.state.published), list(fold.state.checkpoints)
    finally:
        await playing.kill()

    assert not playing.context.faults
    assert [(one.step, one.lineage) for one in saved] == [(1, 0), (2, 0)], "trained again to the same bits"
    assert [read_checkpoint(Path(one.path)).digest for one in saved] == [one.digest for one in saved]
    assert saved[1].digest == published[2]
    assert {path.name for path in files.checkpoints.iterdir()} == {Path(one.path).name for one in saved}
    names = [path.name for path in files.weights.iterdir()]
    assert sorted(name.partition(".")[0][:17] for name in names) == ["lineage0-v000000-", "lineage0-v000002-"]
