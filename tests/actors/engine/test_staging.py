"""Versions that are brought into memory beside a server before its requests are stopped."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from actors.engine.actor import EngineActor
from actors.engine.launch_spec import home_of
from asyncrl.bus.connection import Bus
from asyncrl.engine.client import EngineClient
from asyncrl.engine.embedded.control import EmbeddedControl
from asyncrl.engine.staging import Staging
from asyncrl.weights.sender import StagingMemory
from asyncrl.weights.shared_names import NotShared
from harness.memory import Memory
from harness.stage import Stage, until
from harness.versions import Answers
from topics.engines import EngineReady


async def test_a_version_is_loaded_out_of_staged_memory_and_from_its_files_where_that_fails(
    bus: Bus, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    made = stage(engine={"kind": "embedded", "max_running": 4, "staged": "always"}, supervision={"silence_s": 5.0})
    made.make_model()
    context = made.context("engine", bus)
    actor = EngineActor(dataclasses.replace(context, actor_id="engine-1", stop=asyncio.Event(), vitals={}))
    server = actor._server
    assert isinstance(server, EmbeddedControl) and isinstance(server, EngineClient)
    staging = server._staging
    assert staging is not None
    served: list[Path] = []  # the directory of the weights that were last read from files

    async with Memory(bus, context, context.files.model) as memory, Answers(bus) as answers:
        task = asyncio.create_task(actor.run())

        async def bring() -> Path:
            message = await memory.publish()
            await until(
                lambda: message.version in [one.version for one in answers.messages if isinstance(one, EngineReady)],
                f"version {message.version} is there",
            )
            assert await server.label() == message.key
            served.append(Path((await server.model_info())["model_path"]))
            return Path(message.location)

        await bring()
        await bring()
        assert staging._starting is not None
        staging._starting.result().kill()
        third = await bring()
        await bring()
        with monkeypatch.context() as patched:
            patched.setattr(Staging, "take", lambda self, directory: b"no tensors")
            fifth = await bring()
        actor.context.stop.set()
        await asyncio.gather(task, return_exceptions=True)

    times = [(one.load_s, one.pause_s, one.update_s) for one in answers.messages if isinstance(one, EngineReady)]
    assert all(0 < load_s <= pause_s <= update_s for load_s, pause_s, update_s in times)
    assert served[0] == served[1] == context.files.model
    assert served[2:] == [third, third, fifth]


SERVER = {"kind": "sglang", "gpus": [1], "arguments": ["--skip-tokenizer-init"]}


@pytest.mark.parametrize(
    ("engine", "settings", "staged"),
    [
        ({}, {}, True),
        ({}, {"learner": {"device": "cuda:0"}}, True),
        ({}, {"learner": {"device": "cuda:1"}}, False),
        ({}, {"learner": {"device": "cuda", "ranks": 2}}, False),
        ({"gpus": []}, {"learner": {"device": "cuda"}}, False),
        ({"gpus": [1, 2], "arguments": ["--tp-size", "2"]}, {}, False),
        ({}, {"weights": {"transport": "nccl"}, "learner": {"device": "cuda:0"}}, False),
        ({}, {"weights": {"format": "fp8-blocks"}}, False),
        ({"arguments": ["--device", "cpu"]}, {}, False),
        ({"staged": "never"}, {}, False),
        ({"kind": "embedded", "gpus": [], "arguments": []}, {}, False),
        ({"kind": "embedded", "gpus": [], "arguments": [], "staged": "always"}, {}, True),
    ],
)
def test_versions_are_staged_by_default_for_servers_that_have_their_gpu_for_themselves(
    bus: Bus, stage: Callable[..., Stage], engine: dict[str, Any], settings: dict[str, Any], staged: bool
):
    made = stage(engine={**SERVER, **engine}, **settings)
    made.make_model()

    assert home_of(made.context("engine", bus), None, "").staged is staged


def test_no_version_is_staged_that_would_leave_a_gpu_too_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_file({"a": np.zeros(64, np.float32)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))

    with pytest.raises(NotShared, match="1000 bytes of the GPU are free, expected 256 of a version and 800 more"):
        StagingMemory().fill(tmp_path, torch.device("cuda"), 800)
