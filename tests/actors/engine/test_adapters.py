"""Versions that are adapters: engines sample by what the trainer has, and refuse adapters of other models."""

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from actors.engine.actor import EngineActor
from actors.engine.lora_base import Adapting as Host
from actors.runtime.actor import ActorDown, Context
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import WRITER, publish
from asyncrl.crash import CRASH_FOLDER, arm
from asyncrl.engine.client import EngineClient
from harness.adapting import Adapting, confirmed, playing
from harness.sglang_like import like_sglang
from harness.stage import DEADLINE_S, Stage, until
from harness.versions import Answers
from topics.promotions import WeightsPromoted
from topics.weights import WeightsPublished


def with_model(stage: Callable[..., Stage], *, store: str = "files", **engine: object) -> Stage:
    made = stage(
        engine={"kind": "embedded", "max_running": 4, **engine},
        weights={"store": store},
        learner={"lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"], "publish": "adapter"}},
        supervision={"silence_s": 5.0},
    )
    made.make_model()
    return made


def engine_of(context: Context) -> EngineActor:
    return EngineActor(dataclasses.replace(context, actor_id="engine-1", stop=asyncio.Event(), vitals={}))


@pytest.mark.parametrize(("store", "staged"), [("files", "never"), ("stream", "never"), ("stream", "always")])
async def test_log_probs_of_an_engine_are_those_of_the_trainer_at_each_adapter(
    bus: Bus, stage: Callable[..., Stage], store: str, staged: str
):
    """With `staged`, the actor makes whole models of adapters, as for servers that take no others."""
    context = with_model(stage, store=store, staged=staged).context("engine", bus)
    learner, gaps = Adapting(bus, context), list[float]()
    first = await learner.publish()
    assert first.adapts
    async with Answers(bus) as answers, playing(engine_of(context)) as actor:
        server = actor._server
        assert isinstance(server, EngineClient)
        await confirmed(answers, [0])
        for version in (1, 2):
            gaps.append(await learner.gap(server))
            message = await learner.publish()
            await confirmed(answers, [*range(version + 1)])
            assert await server.label() == message.key
        gaps.append(await learner.gap(server))
    assert max(gaps) < 1e-4
    assert not answers.refused()


async def test_an_engine_goes_back_to_an_older_adapter(
    bus: Bus, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("actors.engine.pinned_version.purpose_of", lambda *_: "live")
    context = with_model(stage).context("engine", bus)
    learner = Adapting(bus, context)
    async with Answers(bus) as answers, playing(engine_of(context)) as actor:
        server = actor._server
        assert isinstance(server, EngineClient)

        async def promote(one: WeightsPublished, by: str) -> None:
            await publish(bus, WeightsPromoted(one.lineage, one.version, one.digest, by, 1), headers={WRITER: "s"})

        first = await learner.publish()
        await promote(first, "command")
        await confirmed(answers, [0])
        near = await learner.gap(server)
        await promote(await learner.publish(), "command")
        await confirmed(answers, [0, 1])
        await promote(first, "rollback")
        await confirmed(answers, [0, 1, 0])
        far = await learner.gap(server)
    assert near < 1e-4
    assert far > 1e-3


async def test_a_server_that_takes_whole_models_gets_the_model_with_the_adapter_in_it(
    bus: Bus, stage: Callable[..., Stage]
):
    loaded: list[dict[str, object]] = []
    async with like_sglang() as server, Answers(bus) as answers:
        context = with_model(stage, kind="external", addresses=[server.address]).context("engine", bus)
        learner = Adapting(bus, context)
        async with playing(engine_of(context)):
            for version in range(3):
                await learner.publish()
                await confirmed(answers, [*range(version + 1)])
                tensors = load_file(Path(server.model_path) / "model.safetensors")
                loaded.append({name: tensor.sum().item() for name, tensor in tensors.items()})
            folders = context.files.fetched.glob
            await until(lambda: len([*folders("*/lineage*")]) == 1, "those before are removed")
            (left,) = folders("*/lineage*")
    assert loaded[0].keys() == load_file(context.files.model / "model.safetensors").keys()
    assert len({str(sums) for sums in loaded}) == 3
    assert left.name.endswith(".merged")


async def test_an_adapter_of_a_model_that_is_not_there_is_refused_and_the_engine_samples_on(
    bus: Bus, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("actors.engine.actor._NEWS_S", 0.1)  # no newer version comes
    context = with_model(stage).context("engine", bus)
    learner = Adapting(bus, context)
    async with playing(engine_of(context)) as actor, Answers(bus) as answers:
        await learner.publish()
        await confirmed(answers, [0])
        file = context.files.model / "model.safetensors"
        weights = load_file(file)
        weights["model.norm.weight"][0] += 1
        times = file.stat()
        save_file(weights, file, metadata={"format": "pt"})
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a copy that keeps them
        second = await learner.publish()
        await until(lambda: bool(answers.refused()), "it is refused", DEADLINE_S)
        assert isinstance(actor._server, EngineClient)
        assert (await actor._server.label()).startswith("0:0:")
    [refused] = answers.refused()
    assert refused.version == 1
    assert f"it is an adapter of the model with digest {second.adapts}" in refused.reason
    assert "put the run's model there" in refused.reason


async def test_an_adapter_is_not_added_to_no_model(tmp_path: Path):
    with pytest.raises(Exception, match="has digest none: no"):
        Host(tmp_path, merges=False).check("1" * 32)


@pytest.mark.parametrize("spoil", ["adapter_config.json", "base_model.json", "adapter_model.safetensors"])
async def test_an_adapter_with_other_bytes_reaches_no_server(
    bus: Bus, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, spoil: str
):
    monkeypatch.setattr("actors.engine.actor._NEWS_S", 0.1)  # no newer version comes
    async with like_sglang() as server, Answers(bus) as answers:
        context = with_model(stage, kind="external", addresses=[server.address]).context("engine", bus)
        learner, announced = Adapting(bus, context), list[WeightsPublished]()

        async def hold_back(message: WeightsPublished) -> int:
            announced.append(message)
            return 0

        announce = learner.announce
        monkeypatch.setattr(learner, "announce", hold_back)
        version = await learner.publish()
        file = Path(version.location) / spoil
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        async with playing(engine_of(context)):
            await announce(version)
            await until(lambda: bool(answers.refused()), "it is refused", DEADLINE_S)
    assert server.loads == []
    assert "differ from its manifest" in answers.refused()[0].reason or "cannot be read" in answers.refused()[0].reason


@pytest.mark.parametrize("point", ["engine.paused", "engine.swapped"])
async def test_an_engine_killed_as_it_loads_an_adapter_begins_again_with_it(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
):
    monkeypatch.setenv(CRASH_FOLDER, str(tmp_path / "points"))
    engines = with_model(stage, store="stream")
    learner = Adapting(bus, engines.context("engine", bus))
    await learner.publish()
    async with Answers(bus) as answers:
        killed = await engines.start("engine")
        await confirmed(answers, [0])
        arm(tmp_path / "points", point, "engine")
        await learner.publish()
        assert await killed.wait() == -signal.SIGKILL
        await engines.start("engine")
        await confirmed(answers, [0, 1])
    assert not answers.refused()


async def test_a_server_killed_as_it_loads_an_adapter_ends_its_actor(bus: Bus, stage: Callable[..., Stage]):
    context = with_model(stage).context("engine", bus)
    learner = Adapting(bus, context)
    actor = engine_of(context)
    load = actor._server.load_weights

    async def killed(directory: Path, key: str) -> None:
        if key.startswith("0:1:"):
            actor._server.kill()
        await load(directory, key)

    actor._server.load_weights = killed  # type: ignore[method-assign]
    async with Answers(bus) as answers:
        task = asyncio.create_task(actor.run())
        await learner.publish()
        await confirmed(answers, [0])
        await learner.publish()
        with pytest.raises(ActorDown):
            await task
    assert answers.ready() == [0]
