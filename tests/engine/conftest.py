"""Servers of each kind that the contract's cases run against."""

import asyncio
import contextlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.engine.client import EngineClient
from asyncrl.weights.transfer_manifest import Described
from benchmarks.engine import save_random_model
from harness.contract import VOCAB, Served, widen
from harness.sglang_real import ABSENT, EXACT, FOUND, engine


@pytest.fixture(
    scope="module", params=["embedded-incremental", "embedded-cumulative", "sglang-incremental", "sglang-cumulative"]
)
def served(request, tmp_path_factory):
    kind, form = request.param.split("-")
    if kind == "sglang" and not FOUND:
        pytest.skip(ABSENT)
    folder = tmp_path_factory.mktemp("contract")
    (folder / "model").mkdir()
    save_random_model(folder / "model", vocab=VOCAB, hidden=32 if EXACT else 256, layers=2)
    widen(folder / "model")
    loop = asyncio.new_event_loop()
    stack = contextlib.AsyncExitStack()
    server = engine(kind, folder / "model", folder / "home", incremental=form == "incremental")
    address = loop.run_until_complete(stack.enter_async_context(server))
    yield Served(kind, form == "incremental", address, folder / "model")
    loop.run_until_complete(stack.aclose())
    loop.close()


@pytest.fixture
async def client(served):
    client = EngineClient(served.address, api_key="secret")
    yield client
    with contextlib.suppress(Exception):
        await client.continue_generation()
        await client.empty()
        await client.update_weights(served.model, "none", flush_cache=True)
    await client.close()


@pytest.fixture
def changed(served: Served, tmp_path: Path) -> tuple[Path, list[Described], dict[str, torch.Tensor]]:
    """The served model with other weights: its directory, and its tensors as calls describe them."""
    shutil.copytree(served.model, tmp_path / "changed")
    file = tmp_path / "changed" / "model.safetensors"
    tensors = {name: tensor * 1.5 for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    described = [Described(name, "float32", list(one.shape), one.nbytes) for name, one in tensors.items()]
    return tmp_path / "changed", described, tensors
