"""A real vLLM for tests, where there is one.

`ASYNCRL_VLLM` is the PYTHONPATH with which this Python imports vLLM 0.32; `scripts/vllm-cpu` makes a folder for a
machine without a GPU and runs these tests.
"""

import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from asyncrl.config.settings import EngineSettings
from asyncrl.engine.control import ServerSpec
from asyncrl.engine.lora_serving import Shape
from asyncrl.engine.vllm.control import VLLMControl

FOUND = os.environ.get("ASYNCRL_VLLM", "")
ABSENT = "ASYNCRL_VLLM names no folder with vLLM; scripts/vllm-cpu makes one (3.1 GB) and runs this test"
ARGUMENTS = ("--enforce-eager", "--dtype", "float32")
ENVIRONMENT = {"PYTHONPATH": FOUND, "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Variables with which a process imports a vLLM for the CPU, with 1 GiB for keys and values."""
VLLM = [
    'engine.kind="vllm"',
    "engine.start_deadline_s=600",
    f"engine.arguments={json.dumps(ARGUMENTS)}",
    "engine.environment={ " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in ENVIRONMENT.items()) + " }",
]
"""Settings of a run with such a server."""


@asynccontextmanager
async def vllm_server(
    model: Path, folder: Path, *, serves: Shape | None = None, more: Sequence[str] = ()
) -> AsyncIterator[VLLMControl]:
    """A server that the product's own control has started, for the length of the block; its key is "secret"."""
    folder.mkdir()
    (folder / "key").write_text("secret\n")
    settings = EngineSettings(
        kind="vllm", max_running=8, arguments=[*ARGUMENTS, *more], environment=ENVIRONMENT, start_deadline_s=600
    )
    control = VLLMControl(ServerSpec("engine-1", settings, model, folder / "log", folder / "key", serves=serves))
    try:
        await control.start()
        yield control
    finally:
        await control.close()
