"""Trainer groups: what every one of them does, and that several ranks come to what one comes to."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from actors.learner.elastic import ElasticGroup, chosen_gpus
from actors.learner.group import GroupLost, RankProcesses, Stopping, TrainerGroup, new_group
from actors.learner.publication import copied_digest, export_model, publish_version, save_checkpoint, step
from actors.learner.rank import Rank
from actors.runtime.actor import ActorFault
from asyncrl.bus.connection import Bus
from asyncrl.bus.merged_reader import Part, read_merged
from asyncrl.process import ChildProcess, python
from asyncrl.run.placement import Job, NoRoom, Placed
from asyncrl.run.placements.local import LocalProcesses
from asyncrl.training.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.protocol import Trainer
from asyncrl.training.publisher import Publisher
from harness.learning import Playing, pack
from harness.stage import Stage, Unretrieved, until
from harness.training import of_all_ranks
from topics.actors import ACTOR_STARTED
from topics.batches import BATCH_TRAINED
from topics.topic import ACTORS, TRAINING, TRAJECTORIES
from topics.weights import CHECKPOINT_SAVED, WEIGHTS_PUBLISHED

SMALL = {"rollout": {"max_new_tokens": 8, "group_size": 2}, "buffer": {"batch_groups": 1, "max_lag": 1}}
LEARNER = {"start_s": 300.0}  # ranks import torch, for minutes on a loaded machine
Start = Callable[..., "asyncio.Future[TrainerGroup]"]


@pytest.fixture
async def start(bus: Bus, stage: Callable[..., Stage]) -> AsyncIterator[Start]:
    """Opens trainer groups of one run."""
    groups: list[TrainerGroup] = []

    async def start_one(trainer: str, ranks: int = 1, divided: str = "", *, inside: bool = False) -> TrainerGroup:
        layout = {"layout": {divided: ranks}} if divided else {}
        stand = stage(**{**SMALL, "learner": {**LEARNER, "trainer": trainer, "ranks": ranks, "lr": 1e-3, **layout}})
        stand.make_model()
        await stand.open()
        context = stand.context("learner", bus)
        group = Rank(bus, context.config, context.files) if inside else new_group(context, lambda: None)
        groups.append(group)
        await group.open()
        return group

    yield start_one
    for group in groups:
        await group.close()


async def batches(bus: Bus, last: int) -> list[int]:
    return [await pack(bus, step) for step in range(1, last + 1)]


@pytest.mark.parametrize(
    ("trainer", "ranks", "divided"),
    [("scripted", 1, ""), ("torch", 1, ""), ("torch", 2, ""), ("torch", 2, "context"), ("megatron", 2, "pipeline")],
)
async def test_what_every_group_does(
    start: Start, bus: Bus, tmp_path: Path, trainer: str, ranks: int, divided: str, monkeypatch: pytest.MonkeyPatch
):
    if trainer == "megatron":
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # compiling would take most of the time
    group = await start(trainer, ranks, divided)
    some = await batches(bus, 3)
    if trainer == "torch":
        await comes_to_what_one_trainer_comes_to(group, await start("torch", inside=True), some, tmp_path, ranks)
    first, second, _ = some
    await group.ask(Rank.gather, first, False)

    result = await step(group, first)
    await group.ask(Publisher.copy_weights, False)
    await group.ask(Publisher.copy_state)
    digest = await copied_digest(group)
    (published, saved), _ = (
        await asyncio.gather(publish_version(group, 0, 1), save_checkpoint(group, Checkpoint(0, 1, digest, first))),
        await step(group, second),
    )
    await group.ask(Publisher.copy_weights, False)
    later = await copied_digest(group)
    await export_model(group, tmp_path / "exported")
    await export_model(group, tmp_path / "exported")

    assert (result.stats.trajectories, result.stats.tokens_trained, result.stats.tokens_stale) == (2, 10, 0)
    assert result.metrics["loss"] is not None
    assert (published.version, published.digest) == (1, digest)
    assert Path(published.location).is_dir()
    assert read_checkpoint(Path(saved)).digest == digest
    assert (tmp_path / "exported").is_dir()
    with pytest.raises(CheckpointError) if trainer != "scripted" else contextlib.nullcontext():
        await group.ask(Trainer.load, tmp_path)
    await group.ask(Trainer.load, saved)
    await group.ask(Publisher.copy_weights, False)
    assert await copied_digest(group) == digest
    assert (later != digest) == (trainer != "scripted")
    await bus.api(f"STREAM.PURGE.{TRAJECTORIES.full_name(bus.run)}", {})
    with pytest.raises(ActorFault, match="are gone"):
        await step(group, second)
    group.check()


async def comes_to_what_one_trainer_comes_to(
    group: TrainerGroup, inside: TrainerGroup, some: list[int], folder: Path, ranks: int
) -> None:
    """The same batches by ranks in processes and by one in this process: bit for bit where there is one rank."""
    ends = []
    for name, one in (("inside", inside), ("group", group)):
        await one.ask(Publisher.copy_state)
        begun = await save_checkpoint(one, Checkpoint(0, 0, "begun", 0))
        results = [await step(one, batch) for batch in some]
        await one.ask(Publisher.copy_weights, False)
        await export_model(one, folder / name)
        ends.append((results, await copied_digest(one), of_all_ranks(folder / name, "model")))
        await one.ask(Trainer.load, begun)
    (alone, digest, expected), (together, same_digest, found) = ends

    if ranks == 1:
        assert (together, same_digest) == (alone, digest)
    for (stats, metrics, _), (same_stats, other, _) in zip(alone, together, strict=True):
        assert same_stats == stats
        assert other["rows"] == metrics["rows"] == 2
        assert other["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-3)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=2e-4), name


async def test_a_group_ends_with_its_first_rank_and_all_that_waits_is_told_and_no_fault_is_left_behind(
    start: Start, bus: Bus, unretrieved: Unretrieved
):
    group = await start("torch", 2)
    assert isinstance(group, RankProcesses)
    first, second = await batches(bus, 2)
    ranks = list(group._placed)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGSTOP)  # no call is answered any more
    some = (step(group, first), group.ask(Rank.gather, second, False), publish_version(group, 0, 1))
    calls: list[asyncio.Future[object]] = [asyncio.ensure_future(call) for call in some]
    await asyncio.sleep(0)  # they are under way
    os.kill(ranks[1].pid, signal.SIGKILL)

    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [(type(one), "rank 1 ended" in str(one)) for one in found] == [(GroupLost, True)] * 3
    with pytest.raises(GroupLost, match="rank 1 ended"):
        await step(group, first)
    await group.close()
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL] * 2
    assert unretrieved() == []


@pytest.mark.slow
async def test_a_rank_that_is_killed_or_freezes_starts_the_group_anew_and_nothing_is_published_twice(
    bus: Bus, stage: Callable[..., Stage]
):
    learner = {**LEARNER, "ranks": 2, "checkpoint_every": 2, "lr": 1e-3}
    stand = stage(**SMALL, learner=learner, supervision={"silence_s": 3.0})
    stand.make_model()
    await stand.open()
    playing = Playing(stand.context("learner", bus))
    try:
        for step, end, victim in ((1, signal.SIGKILL, 0), (2, signal.SIGSTOP, 1), (3, None, 0)):
            await pack(bus, step)
            await until(lambda step=step: playing.learner.fold.state.published.keys() >= {step}, f"version {step}", 300)
            if end is not None:
                os.kill(playing.learner.group._placed[victim].pid, end)
    finally:
        await playing.kill()

    assert not playing.context.faults
    log = Log()
    await read_merged(bus, [Part(TRAINING)], log.apply, log.refuse)
    await read_merged(bus, [Part(ACTORS, subjects=[ACTOR_STARTED.pattern(bus.run)])], log.apply, log.refuse)
    reasons = [message.lost for message in log.of(ACTOR_STARTED) if message.role == "learner"]
    assert len(reasons) >= 2
    assert all(reason.startswith("its trainer group was lost: rank ") for reason in reasons)
    assert [message.step for message in log.of(BATCH_TRAINED)] == [1, 2, 3]
    assert [(message.lineage, message.version) for message in log.of(WEIGHTS_PUBLISHED)] == [(0, v) for v in range(4)]
    assert [message.step for message in log.of(CHECKPOINT_SAVED)] == [2]


class Silent(LocalProcesses):
    """Starts another program in place of the second rank, which says nothing."""

    async def start(self, job: Job) -> Placed:
        if job.words[1] == "1":
            return await ChildProcess.start(["sleep", "1000"], log=self.log(job.name))
        return await super().start(job)


async def test_a_rank_that_is_missing_at_the_start_is_named(bus: Bus, stage: Callable[..., Stage]):
    stand = stage(**SMALL, learner={**LEARNER, "ranks": 2})
    await stand.open()
    context = stand.context("learner", bus)
    context.placement = Silent(context.files.logs)
    context.config.learner.start_s = 0.1
    group = RankProcesses(context, lambda: None)

    with pytest.raises(GroupLost, match=r"1\] did not connect within learner.start_s = 0.1 s; see `asyncrl logs learn"):
        await group.open()
    await group.close()


async def test_a_learner_that_is_asked_to_stop_does_not_wait_for_its_ranks(bus: Bus, stage: Callable[..., Stage]):
    stand = stage(**SMALL, learner={**LEARNER, "ranks": 2})
    await stand.open()
    context = stand.context("learner", bus)
    context.placement = Silent(context.files.logs)
    group = RankProcesses(context, lambda: None)
    opening = asyncio.create_task(group.open())
    await until(lambda: any(context.files.logs.iterdir()), "a rank has started")
    context.leave()

    with pytest.raises(Stopping, match="before its trainer group is open"):
        await asyncio.wait_for(opening, LEARNER["start_s"] / 5)
    await group.close()


class Otherwise(LocalProcesses):
    """Runs other code in the process of the second rank."""

    def __init__(self, logs: Path, code: str) -> None:
        super().__init__(logs)
        self._code = code
        self.started = 0

    async def start(self, job: Job) -> Placed:
        if job.words[1] != "1":
            return await super().start(job)
        self.started += 1
        command = python("-c", self._code, *job.words, "--credentials", str(job.credentials))
        return await ChildProcess.start(command, log=self.log(job.name), environment={"OMP_NUM_THREADS": "1"})


HANGS = """
import time
from actors.learner import rank, rank_process
rank.take_gpu = lambda *_: time.sleep(1000)
rank_process.main()
"""


class Impatient(RankProcesses):
    """Waits for GPUs no longer than a second, once all ranks are there."""

    async def _until_connected(self) -> None:
        await super()._until_connected()
        self._context.config.learner.start_s = 1.0


@pytest.mark.slow
async def test_a_card_that_hangs_at_the_start_is_missing_after_a_deadline(bus: Bus, stage: Callable[..., Stage]):
    stand = stage(**SMALL, learner={**LEARNER, "ranks": 2})
    stand.make_model()
    await stand.open()
    context = stand.context("learner", bus)
    context.placement = Otherwise(context.files.logs, HANGS)
    group = Impatient(context, lambda: None)

    with pytest.raises(GroupLost, match=r"1\] did not take their GPUs within learner.start_s = 1 s") as lost:
        await group.open()

    assert lost.value.rank is not None  # so the learner may go on without it
    await group.close()


async def test_a_rank_that_does_not_start_for_another_reason_than_its_card_is_not_given_up(
    bus: Bus, stage: Callable[..., Stage]
):
    stand = stage(**SMALL, learner={**LEARNER, "ranks": 2, "elastic_s": 600.0})
    await stand.open()
    context = stand.context("learner", bus)
    context.placement = placement = Otherwise(context.files.logs, "raise SystemExit('no such library')")
    group = ElasticGroup(context, lambda: None)

    with pytest.raises(GroupLost, match="rank 1 ended: exit code 1: no such library"):
        await group.open()

    assert placement.started == 1
    await group.close()


@pytest.mark.slow
async def test_ranks_without_a_card_say_so_and_are_given_up(
    bus: Bus, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "none")
    stand = stage(**SMALL, learner={**LEARNER, "ranks": 2, "elastic_s": 0.1, "device": "cuda"})
    stand.make_model()
    await stand.open()
    group = ElasticGroup(stand.context("learner", bus), lambda: None)

    missing = r"GPUs \[0, 1\] are missing, and the 0 others hold no whole model; the last reason: rank 0 ended: exit"
    with pytest.raises(GroupLost, match=missing + r" code 5: .*rank 0 has no GPU: found 0 GPUs here"):
        await group.open()
    await group.close()


class Refusing(LocalProcesses):
    """Has no GPU for one of two ranks."""

    refuses, refused = True, 0

    async def start(self, job: Job) -> Placed:
        if self.refuses and (job.words[1:3] == ("1", "2") or job.module == "actors.learner.gpu_probe"):
            self.refused += 1
            raise NoRoom("no GPU 1")
        return await super().start(job)


@pytest.mark.slow
async def test_a_learner_whose_card_is_not_replaced_goes_on_with_fewer_and_grows_back(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    stand = stage(**SMALL, learner={**LEARNER, "ranks": 2, "elastic_s": 0.1, "checkpoint_every": 1, "lr": 1e-3})
    stand.make_model()
    await stand.open()
    context = stand.context("learner", bus)
    context.placement = placement = Refusing(context.files.logs)
    playing, missing = Playing(context), []
    try:
        for step in (1, 2, 3, 4):
            await pack(bus, step)
            await until(lambda step=step: playing.learner.fold.state.published.keys() >= {step}, f"version {step}", 300)
            if step == 3:
                await until(lambda: not context.vitals["ranks_missing"], "it has all ranks from the checkpoint on", 300)
            missing.append(context.vitals["ranks_missing"])
            if step == 1:
                (rank,) = playing.learner.group._group._placed
                os.kill(rank.pid, signal.SIGKILL)  # it is tried with both again, and the other one is still missing
            if step == 2:
                placement.refuses = False
                await until(lambda: playing.learner.group.can_grow, "its GPU is there again", 300)
    finally:
        await playing.kill()

    assert (missing, context.faults) == ([1, 1, 0, 0], [])
    log = Log()
    await read_merged(bus, [Part(TRAINING)], log.apply, log.refuse)
    assert [message.step for message in log.of(BATCH_TRAINED)] == [1, 2, 3, 4]
    assert len({(one.lineage, one.version) for one in log.of(WEIGHTS_PUBLISHED)}) == len(log.of(WEIGHTS_PUBLISHED))


class StoppedMeanwhile(ElasticGroup):
    """Is told to stop while it waits for a GPU."""

    async def _pause(self, left_s: float) -> None:
        self._context.stop.set()
        await super()._pause(left_s)


async def test_a_learner_that_stops_while_a_card_is_missing_starts_no_rank_anew(bus: Bus, stage: Callable[..., Stage]):
    stand = stage(**SMALL, learner={**LEARNER, "ranks": 2, "elastic_s": 600.0})
    await stand.open()
    context = stand.context("learner", bus)
    context.placement = placement = Refusing(context.files.logs)
    group = StoppedMeanwhile(context, lambda: None)

    with pytest.raises(GroupLost, match="no GPU 1"):
        await group.open()

    assert placement.refused == 1
    await group.close()


@pytest.mark.parametrize(
    ("cards", "layout", "chosen"),
    [
        ((0, 2, 3), Layout(), [0, 2, 3]),
        ((0, 2, 3), Layout(tensor=2), [0, 2]),
        ((0, 1, 2, 4, 5, 6, 7), Layout(pipeline=2, expert=2), [0, 1, 2, 4]),
        ((3,), Layout(context=2), []),
    ],
)
def test_the_cards_that_are_left_are_as_many_as_the_layout_divides(cards, layout, chosen):
    assert list(chosen_gpus(cards, layout)) == chosen


class Log:
    def __init__(self) -> None:
        self._messages: list = []

    def apply(self, topic, message, record):
        self._messages.append((topic, message))

    def refuse(self, record, error):
        pytest.fail(f"{record.subject}: {error}")

    def of(self, topic) -> list:
        return [message for found, message in self._messages if found is topic]
