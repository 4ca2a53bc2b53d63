"""The learner as an actor on real logs, with a small torch model: who trains, when, and on which thread."""

import asyncio
import math
import os
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from actors.learner.rank import Rank
from actors.runtime.actor import ActorFault
from actors.runtime.keeper import Keeper
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import Record, read_last
from asyncrl.bus.publish import publish
from asyncrl.errors import LaunchError
from asyncrl.run.resume import request_skip
from asyncrl.training.publisher import Publisher
from asyncrl.training.torch.trainer import TorchTrainer
from asyncrl.weights.directories import CheckpointError
from asyncrl.weights.tensors import file_record
from harness.keepers import SILENCE_S, Clock, clock
from harness.learning import Open, log_of, opened, pack, saved, train, trained
from harness.stage import Unretrieved, until
from topics.actors import KeeperSnapshot
from topics.batches import BATCH_TRAINED, Objective
from topics.table import BY_NAME
from topics.topic import BATCHES, TRAJECTORIES
from topics.weights import (
    CHECKPOINT_LOST,
    CHECKPOINT_SAVED,
    WEIGHTS_PUBLISHED,
    WEIGHTS_REJECTED,
    WEIGHTS_UNCHANGED,
    CheckpointSaved,
    WeightsPublished,
    WeightsRefused,
)
from topics.wire import decode

__all__ = ["clock", "opened"]  # fixtures


async def test_a_learner_that_stands_by_has_no_model_and_one_that_starts_again_stands_by(
    opened: Open, bus: Bus, monkeypatch, clock: Clock
):
    models = []
    open_group = Rank.open
    monkeypatch.setattr(Rank, "open", lambda group: (models.append(group), open_group(group))[1])
    first = await opened(1, supervision={"silence_s": SILENCE_S})
    await pack(bus, 1)
    await until(lambda: trained(bus, 1), "step 1")
    spare = await opened(2)
    await until(lambda: spare.context.take_vitals().doing.kind == "standby", "the spare stands by")

    await first.kill()
    await clock.silence(first.learner.keeper, spare.learner.keeper)
    await pack(bus, 2)
    await until(lambda: trained(bus, 2), "the spare trains step 2")
    again = await opened(1)
    await until(lambda: again.context.take_vitals().doing.kind == "standby", "the first stands by")
    await pack(bus, 3)
    await until(lambda: trained(bus, 3), "step 3")

    log = await log_of(bus)
    assert [claim.actor_id for claim in log[BY_NAME["learner.claimed"]]] == ["learner-1", "learner-2"]
    assert [message.step for message in log[BATCH_TRAINED]] == [1, 2, 3]
    assert [message.lineage for message in log[WEIGHTS_PUBLISHED]] == [0, 0, 0, 0]
    assert len(models) == 2
    assert not spare.context.faults


async def test_a_learner_that_starts_again_goes_on_from_its_snapshot(opened: Open, bus: Bus, monkeypatch):
    first = await opened(learner={"checkpoint_every": 4}, supervision={"silence_s": 1.0, "snapshot_every": 10})
    await train(bus, 1, 10)
    await first.kill()
    newest = await read_last(bus, BY_NAME["learner.snapshot"])
    assert newest is not None
    positions = decode(KeeperSnapshot, newest.data).positions

    read: list[Record] = []
    take = Keeper._take
    monkeypatch.setattr(
        Keeper, "_take", lambda keeper, *received: (read.append(received[-1]), take(keeper, *received))[1]
    )
    await opened()
    await train(bus, 11, 12)

    assert positions[BATCHES.name] > 4
    assert all(record.sequence > positions[record.stream.name] for record in read)
    log = await log_of(bus)
    assert [message.step for message in log[BATCH_TRAINED]] == [*range(1, 13)]
    assert {message.lineage for message in log[WEIGHTS_PUBLISHED]} == {0}  # what was trained again has the same bits
    assert [message.version for message in log[WEIGHTS_PUBLISHED]] == [*range(13)]


def spoil(checkpoint: CheckpointSaved) -> None:
    os.truncate(Path(checkpoint.path) / "model.safetensors", 100)


async def test_a_torn_checkpoint_counts_no_more_and_is_written_anew(opened: Open, bus: Bus):
    first = await opened(learner={"checkpoint_every": 2})
    await train(bus, 1, 5)
    await until(lambda: saved(bus, 4), "checkpoint 4")
    await first.kill()
    torn = (await log_of(bus))[CHECKPOINT_SAVED][-1]
    spoil(torn)

    await opened()
    await train(bus, 6, 6)
    await until(lambda: saved(bus, 6), "checkpoint 6")

    log = await log_of(bus)
    assert [(lost.step, lost.path) for lost in log[CHECKPOINT_LOST]] == [(4, torn.path)]
    assert [message.step for message in log[BATCH_TRAINED]] == [1, 2, 3, 4, 5, 6]
    assert [message.step for message in log[CHECKPOINT_SAVED]] == [2, 4, 4, 6]


async def test_without_a_readable_checkpoint_training_begins_anew_where_the_tokens_are_there(opened: Open, bus: Bus):
    first = await opened(learner={"checkpoint_every": 2})
    await train(bus, 1, 6)
    await until(lambda: saved(bus, 6), "checkpoint 6")
    await first.kill()
    for checkpoint in (await log_of(bus))[CHECKPOINT_SAVED]:
        spoil(checkpoint)

    await opened()
    await train(bus, 7, 7)

    log = await log_of(bus)
    assert [message.step for message in log[BATCH_TRAINED]] == [*range(1, 8)]
    assert {message.lineage for message in log[WEIGHTS_PUBLISHED]} == {0}


async def test_nothing_of_a_checkpoint_that_fails_half_way_is_left_in_the_weights(opened: Open, bus: Bus):
    first = await opened(learner={"checkpoint_every": 2})
    await train(bus, 1, 4)
    await until(lambda: saved(bus, 4), "checkpoint 4")
    await first.kill()
    for checkpoint in (await log_of(bus))[CHECKPOINT_SAVED]:
        lose_the_rng(Path(checkpoint.path))

    await opened()
    await train(bus, 5, 5)

    log = await log_of(bus)
    assert [lost.step for lost in log[CHECKPOINT_LOST]] == [4, 2]
    # Steps 1 to 4 were trained again from the first weights, to the same bits.
    assert {message.lineage for message in log[WEIGHTS_PUBLISHED]} == {0}


def lose_the_rng(checkpoint: Path) -> None:
    """Leave a checkpoint whose files are whole, but which cannot be loaded once its weights were."""
    path, record = checkpoint / "optimizer.safetensors", checkpoint / "checkpoint.json"
    tensors = load_file(path)
    del tensors["rng"]
    save_file(tensors, path, metadata={"format": "pt"})
    known = msgspec.json.decode(record.read_bytes())
    known["files"][path.name], known["xxh3"] = file_record(path), ""
    record.write_bytes(msgspec.json.encode(known))


async def test_a_batch_that_cannot_be_trained_names_the_command_to_go_on_and_is_skipped_on_request(
    opened: Open, bus: Bus
):
    first = await opened(learner={"checkpoint_every": 3})
    await train(bus, 1, 2)
    await pack(bus, 3, rewards=(0.0, 1e30), estimator="none")  # a gradient that is not finite
    await pack(bus, 4)
    with pytest.raises(ActorFault) as failed:
        await first.task
    command = f"to continue without this batch: asyncrl up --resume {first.context.files.root} --skip-batch 3"
    assert str(failed.value).startswith("batch 3: loss ")
    assert str(failed.value).endswith(command)
    for wrong in (2, 5):
        with pytest.raises(LaunchError, match="batches up to 2 are trained, and batches 3 to 4 wait"):
            await request_skip(bus, first.context.config.origin, wrong)

    await request_skip(bus, first.context.config.origin, 3)
    second = await opened()
    await until(lambda: trained(bus, 4), "step 4")
    await second.kill()
    await opened()  # trains again what no checkpoint contains, without the batch that was skipped
    await train(bus, 5, 5)

    log = await log_of(bus)
    steps = [(message.step, message.skipped, message.trajectories, message.lags) for message in log[BATCH_TRAINED]]
    assert steps[2] == (3, True, 2, {})
    assert [(step, skipped) for step, skipped, *_ in steps] == [
        (1, False),
        (2, False),
        (3, True),
        (4, False),
        (5, False),
    ]
    digests = {message.version: message.digest for message in log[WEIGHTS_PUBLISHED]}
    assert sorted(digests) == [0, 1, 2, 3, 4, 5]
    assert digests[3] == digests[2] != digests[4]
    assert {message.lineage for message in log[WEIGHTS_PUBLISHED]} == {0}


@pytest.mark.parametrize("broken", ["report", "stop"])
async def test_a_step_beyond_an_asserted_bound_is_counted_or_ends_the_run_before_it_is_reported(
    opened: Open, bus: Bus, broken: str
):
    learner = await opened(learner={"assertions": {"k3": 1e-9, "broken": broken}})
    await pack(bus, 1)  # its log-probs are made up

    if broken == "report":
        await until(lambda: trained(bus, 1), "step 1")
        assert learner.context.vitals["assertions_broken"] == 1
    else:
        with pytest.raises(ActorFault, match=r"batch 1: mismatch_k3 of step 1 is .* --skip-batch 1"):
            await learner.task
        assert (await log_of(bus))[BATCH_TRAINED] == []


async def test_a_step_far_out_of_what_is_usual_names_its_trajectories_also_after_a_restart(opened: Open, bus: Bus):
    first = await opened()
    for step in range(1, 9):
        await pack(bus, step)
    await pack(bus, 9, rewards=(0.0, 1e4), estimator="none")
    await until(lambda: trained(bus, 9), "step 9")
    await first.kill()
    await opened()
    await pack(bus, 10, rewards=(2e4, 0.0), estimator="none")
    await pack(bus, 11)
    await until(lambda: trained(bus, 11), "step 11")

    steps = (await log_of(bus))[BATCH_TRAINED]
    found = {step.step: step.anomaly for step in steps if step.anomaly is not None}
    assert {step: [one.trajectory_id for one in anomaly.carriers] for step, anomaly in found.items()} == {
        9: ["p000009-1"],
        10: ["p000010-0"],
    }
    norm = steps[8].metrics["grad_norm"]
    assert found[9].found.startswith(f"gradient norm {norm:.4g}, usual is up to ")
    assert found[9].carriers[0].grad_norm == pytest.approx(norm, rel=1e-3)  # the other member has advantage 0


async def test_a_learner_that_fails_leaves_no_fault_behind_that_nobody_retrieves(
    opened: Open, bus: Bus, monkeypatch, unretrieved: Unretrieved
):
    def refuse(publisher: Publisher, *_: object) -> None:
        raise CheckpointError("the disk is full")

    first = await opened(learner={"checkpoint_every": 1})
    await train(bus, 1, 1)
    refuse.__qualname__ = Publisher.prepare.__qualname__  # by which ranks are called
    monkeypatch.setattr(Publisher, "prepare", refuse)
    await pack(bus, 2)  # its version cannot be written; its checkpoint waits for that; the next batch is fetched
    await pack(bus, 3)

    with pytest.raises(ActorFault, match="the disk is full; the last checkpoint is intact"):
        await first.task
    assert unretrieved() == []


async def test_a_batch_whose_tokens_are_gone_can_be_skipped(opened: Open, bus: Bus):
    await pack(bus, 1)
    await bus.api(f"STREAM.PURGE.{TRAJECTORIES.full_name(bus.run)}", {})
    first = await opened()
    with pytest.raises(ActorFault, match=r"batch 1, p000001-\d: the tokens in .* are gone; .* --skip-batch 1$"):
        await first.task

    await request_skip(bus, first.context.config.origin, 1)
    await opened()
    await train(bus, 2, 2)

    assert [message.skipped for message in (await log_of(bus))[BATCH_TRAINED]] == [True, False]


@pytest.mark.parametrize("delta", ["never", "always"])
async def test_a_step_that_changes_nothing_is_an_alarm_and_its_number_is_announced_without_weights(
    opened: Open, bus: Bus, delta: str
):
    learner = await opened(weights={"delta": delta})
    for step, rate in enumerate((1e-3, 0.0, 0.0, 1e-3), 1):
        await pack(bus, step, objective=Objective(learning_rate=rate))
    await until(lambda: trained(bus, 4), "step 4")

    versions = (log := await log_of(bus))[WEIGHTS_PUBLISHED]
    assert [message.version for message in versions] == [0, 1, 2, 3, 4]
    alarms = [(alarm.version, alarm.base) for alarm in log[WEIGHTS_UNCHANGED]]
    assert alarms == [(2, versions[1].key), (3, versions[2].key)]
    assert [message.digest == versions[1].digest for message in versions] == [False, True, True, True, False]
    stored = sorted(path.name for path in learner.context.files.weights.iterdir())
    assert stored == sorted(Path(versions[number].location).name for number in (0, 1, 4))
    for same in versions[2:4]:
        assert same.is_unchanged and same.full > 0 and not same.bytes
        assert (same.base, same.location) == (versions[1].key, versions[1].location)
    assert "no base" not in versions[4].choice


async def test_the_scripted_trainer_changes_nothing_and_that_is_no_alarm(opened: Open, bus: Bus):
    await opened(learner={"trainer": "scripted"})
    await train(bus, 1, 3)
    log = await log_of(bus)
    assert log[WEIGHTS_PUBLISHED][-1].is_unchanged and not log[WEIGHTS_UNCHANGED]


async def test_weights_that_are_not_finite_are_an_alarm_and_no_version(opened: Open, bus: Bus, monkeypatch):
    learner = await opened()
    await train(bus, 1, 1)
    copy = TorchTrainer.copy_weights

    def spoiled(one: TorchTrainer, *, whole: bool):
        next(iter(one._own.parameters.values())).data.view(-1)[0] = math.inf
        return copy(one, whole=whole)

    monkeypatch.setattr(TorchTrainer, "copy_weights", spoiled)
    await pack(bus, 2)
    with pytest.raises(ActorFault, match=r"version 2: tensor \S+ holds values that are not finite"):
        await asyncio.wait_for(learner.task, 60)

    log = await log_of(bus)
    assert [message.version for message in log[WEIGHTS_PUBLISHED]] == [0, 1]
    [alarm] = log[WEIGHTS_REJECTED]
    assert (alarm.lineage, alarm.version) == (0, 2) and "not finite" in alarm.reason
    assert not list(learner.context.files.weights.glob("*v000002*"))


async def test_a_refused_difference_is_answered_with_the_full_version_once(opened: Open, bus: Bus, monkeypatch):
    calls: list[str] = []
    for name in ("copy_weights", "rest"):
        method = getattr(TorchTrainer, name)
        monkeypatch.setattr(
            TorchTrainer, name, lambda one, n=name, method=method, **how: (calls.append(n), method(one, **how))[1]
        )
    await opened(weights={"delta": "always"}, learner={"offload_idle": True})
    await train(bus, 1, 2)
    record = await read_last(bus, WEIGHTS_PUBLISHED)
    assert record is not None
    delta = decode(WeightsPublished, record.data)
    await until(lambda: calls[-1] == "rest", "the trainer idles")
    for engine in ("engine-1", "engine-2"):
        refused = WeightsRefused(engine, delta.lineage, delta.version, record.sequence, "a chunk is missing")
        await publish(bus, refused)

    async def answered() -> bool:
        newest = await read_last(bus, WEIGHTS_PUBLISHED)
        return newest is not None and decode(WeightsPublished, newest.data).answers == record.sequence

    await until(answered, "the full version")
    await until(lambda: calls[-3:] == ["rest", "copy_weights", "rest"], "it idles again")
    await train(bus, 3, 3)

    versions = (await log_of(bus))[WEIGHTS_PUBLISHED]
    assert [message.version for message in versions] == [0, 1, 2, 2, 3]
    assert [bool(message.base) for message in versions] == [False, True, True, False, True]
    assert versions[3].key == delta.key == versions[4].base
    assert [message.answers for message in versions] == [0, 0, 0, record.sequence, 0]
