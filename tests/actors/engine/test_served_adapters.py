"""Adapters that the server adds at each token: they are loaded by name, and each request gives the name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actors.engine.actor import EngineActor
from actors.runtime.actor import ActorDown
from actors.runtime.engines import follow_fleet, open_fleet
from asyncrl.bus.connection import Bus
from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.fleet import Wanted
from asyncrl.engine.generator import Generator
from asyncrl.training.init_model import create_configured
from harness.adapting import Adapting, confirmed, playing
from harness.sglang_like import like_sglang
from harness.sglang_real import ABSENT, EXACT, FOUND, arguments, environment
from harness.stage import DEADLINE_S, Stage, until
from harness.versions import Answers
from harness.vllm_real import ABSENT as NO_VLLM
from harness.vllm_real import ARGUMENTS, ENVIRONMENT
from harness.vllm_real import FOUND as VLLM_FOUND
from topics.engines import EngineReady

TARGETS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
TAKES = {"enable_lora": True, "max_lora_rank": 16, "lora_target_modules": [*TARGETS, "o_proj"]}


def served(stage: Callable[..., Stage], *, model: dict[str, Any] | None = None, **engine: object) -> Stage:
    made = stage(
        model=model or {},
        engine={"max_running": 4, "adapters": "served", **engine},
        learner={"lora": {"rank": 4, "alpha": 8.0, "targets": TARGETS, "publish": "adapter"}},
        supervision={"silence_s": 30.0},
    )
    create_configured(made.files.model, made.config)
    return made


async def test_each_request_names_the_adapter_of_its_version_and_those_before_are_removed(
    bus: Bus, stage: Callable[..., Stage]
):
    async with like_sglang() as server, Answers(bus) as answers:
        server.info = TAKES
        server.adapters["of another run/0:0:d"] = "/there"
        made = served(stage, kind="external", addresses=[server.address])
        context = made.context("engine", bus)
        learner, worker = Adapting(bus, context), made.context("rollout", bus)
        fleet = open_fleet(worker)
        listener = await follow_fleet(worker, fleet)
        try:
            async with playing(EngineActor(context)):
                for version in range(3):
                    message = await learner.publish()
                    await confirmed(answers, [*range(version + 1)])
                    name = f"{bus.run}/{message.key}"
                    assert server.adapters == {"of another run/0:0:d": "/there", name: message.location}
                    generator = Generator(fleet, ModelInfo("any", 64, 4096), str, counts=worker.vitals)
                    sampled = await generator.generate(
                        np.array([5], np.int32), SamplingParams(4), wanted=Wanted(version, exact=True)
                    )
                    assert server.asked[-1].adapter == name
                    assert {*sampled.versions.tolist()} == {version}
        finally:
            await listener.close()
            await fleet.close()
    assert {one.adapter for one in server.asked} >= {f"{bus.run}/{key}" for key in server.loads}
    assert server.model_path == "base", "its own weights stay"


async def test_an_adapter_that_is_there_already_is_loaded_again(bus: Bus, stage: Callable[..., Stage]):
    """Load it for an actor in the place of one that died, and where another client relabelled the server."""
    async with like_sglang() as server, Answers(bus) as answers:
        server.info = TAKES
        made = served(stage, kind="external", addresses=[server.address])
        message = await Adapting(bus, made.context("engine", bus)).publish()
        for _ in range(2):
            known = len(answers.ready())
            async with playing(EngineActor(made.context("engine", bus))):
                await confirmed(answers, [0] * (known + 1))
        async with playing(EngineActor(made.context("engine", bus))):
            await confirmed(answers, [0] * 3)
            server.weight_version = "another"
            await confirmed(answers, [0] * 4)
        assert server.adapters == {f"{bus.run}/{message.key}": message.location}
    assert not answers.refused()


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"enable_lora": False}, "enable_lora = False"),
        ({"max_lora_rank": 2}, "max_lora_rank = 2"),
        ({"lora_target_modules": ["q_proj"]}, r"lora_target_modules = \['q_proj'\]"),
    ],
)
async def test_a_server_that_takes_no_such_adapters_ends_its_actor_at_the_start(
    bus: Bus, stage: Callable[..., Stage], changed: dict[str, Any], found: str
):
    async with like_sglang() as server:
        server.info = {**TAKES, **changed}
        context = served(stage, kind="external", addresses=[server.address]).context("engine", bus)
        wanted = f"{found}.*expected a server with --enable-lora --max-lora-rank 4.*--lora-target-modules q_proj v_proj"
        with pytest.raises(ActorDown, match=wanted):
            await EngineActor(context).run()


async def test_an_adapter_that_a_server_refuses_is_refused(
    bus: Bus, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("actors.engine.actor._NEWS_S", 0.1)  # no newer version comes

    async def full(_name: str) -> str:
        return "no room"

    async with like_sglang() as server, Answers(bus) as answers:
        server.info, server.refusal = TAKES, full
        context = served(stage, kind="external", addresses=[server.address]).context("engine", bus)
        learner = Adapting(bus, context)
        async with playing(EngineActor(context)):
            await learner.publish()
            await until(lambda: bool(answers.refused()), "it is refused", DEADLINE_S)
    assert "no room" in answers.refused()[0].reason
    assert not answers.ready()


SHAPE = {} if EXACT else {"layers": 28, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072}
"""Of the model: for a GPU that of Qwen3-0.6B, with a small vocabulary."""


@pytest.mark.slow
@pytest.mark.skipif(not FOUND, reason=ABSENT)
@pytest.mark.parametrize("form", ["served", "merged"])
async def test_log_probs_of_sglang_are_those_of_the_trainer_at_each_adapter(
    bus: Bus, stage: Callable[..., Stage], form: str
):
    """SGLang is started by the product; it adds the adapter at each token, or loads a model with the adapter in it."""
    words = [*arguments(), "--skip-tokenizer-init", *(["--lora-backend", "torch_native"] if EXACT else [])]
    engine = {"kind": "sglang", "arguments": words, "environment": environment(), "adapters": form}
    await log_probs_are_those_of_the_trainer(bus, served(stage, model={"create": SHAPE}, **engine), form, exact=EXACT)


@pytest.mark.slow
@pytest.mark.skipif(not VLLM_FOUND, reason=NO_VLLM)
@pytest.mark.parametrize("form", ["served", "merged"])
async def test_log_probs_of_vllm_are_those_of_the_trainer_at_each_adapter(
    bus: Bus, stage: Callable[..., Stage], form: str
):
    engine = {"kind": "vllm", "arguments": [*ARGUMENTS], "environment": ENVIRONMENT, "adapters": form}
    await log_probs_are_those_of_the_trainer(bus, served(stage, **engine), form, exact=True)


async def log_probs_are_those_of_the_trainer(bus: Bus, made: Stage, form: str, *, exact: bool) -> None:
    context = made.context("engine", bus)
    learner, actor = Adapting(bus, context, *([] if exact else ["bfloat16", "cuda"])), EngineActor(context)
    server, gaps = actor._server, list[float]()
    assert isinstance(server, EngineClient)
    async with Answers(bus) as answers, playing(actor):
        for version in range(4):
            message = await learner.publish()
            await until(lambda v=version: len(answers.ready()) > v, f"version {version} is there")
            assert await server.label() == message.key
            gaps += [await learner.gap(server, adapter=server.adapter) for _ in range(4)]
        ready = [one for one in answers.messages if isinstance(one, EngineReady)]
        far = await learner.gap(server) if form == "served" else 1.0
    print(f"{form}: largest gap {max(gaps)}, without the adapter {far}, {message.bytes} bytes a version")
    print("pause, load, fetch in s:", [(one.pause_s, one.load_s, one.fetch_s) for one in ready])
    assert max(gaps) < (1e-4 if exact else 0.1)
    assert far > 2 * max(gaps)
    assert [one.version for one in ready] == [0, 1, 2, 3]
