"""Experts of each token: the same cases against the embedded engine and a real SGLang that serve a mixture."""

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.random_model import SHAPES, write_random_model
from harness.contract import Served
from harness.sglang_real import ABSENT, EXACT, FOUND, arguments, ask, engine, events_in, post

pytestmark = pytest.mark.slow

SHAPE = SHAPES["tiny-moe"] if EXACT else SHAPES["tiny-moe"]._replace(hidden=256, head_dim=64)
EACH = SHAPE.experts[1] if SHAPE.experts else 0
PROMPT = [3 + place % 30 for place in range(40)]
SAMPLING = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module", params=["embedded", "sglang"])
def served(request: Any, tmp_path_factory: Any) -> Iterator[Served]:
    kind = request.param
    if kind == "sglang" and not FOUND:
        pytest.skip(ABSENT)
    folder = tmp_path_factory.mktemp("experts")
    write_random_model(folder / "model", SHAPE, context=256, dtype="float32")
    # Overlapped with the next step, its copy to the host is a view on a CPU, which that step writes over.
    kernels = ["--disable-overlap-schedule"] if "cpu" in arguments() else ["--moe-runner-backend", "triton"]
    more = ["--enable-return-routed-experts", *kernels]
    with asyncio.Runner() as runner:
        server = engine(kind, folder / "model", folder / "home", incremental=True, more=more)
        yield Served(kind, True, runner.run(server.__aenter__()), folder / "model")
        runner.run(server.__aexit__(None, None, None))


def rows_of(meta: dict[str, Any]) -> Any:
    """[T, layers, experts of a token], each token's experts in rising order."""
    found = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
    return np.sort(found.reshape(-1, SHAPE.layers, EACH), -1)


async def told(served: Served, **changes: Any) -> tuple[list[int], dict[str, Any]]:
    body = ask(input_ids=PROMPT, sampling_params=SAMPLING, return_routed_experts=True, **changes)
    status, answer = await post(served, "/generate", body)
    assert status == 200, answer
    return answer["output_ids"], answer["meta_info"]


def chosen(path: Path, ids: list[int]) -> Any:
    """As `rows_of`, by the training forward."""
    model, found = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: found.append(out[2]))
    with torch.no_grad():
        model(torch.tensor([ids]))
    return torch.stack(found, 1).sort(-1).values.numpy()


async def test_the_experts_of_every_token_that_was_fed_are_those_of_the_training_forward(served: Served):
    for cached in (False, True):
        tokens, meta = await told(served, extra_key="v")

        assert (meta["cached_tokens"] > 0) is cached
        rows, expected = rows_of(meta), chosen(served.model, [*PROMPT, *tokens[:-1]])
        assert rows.shape == expected.shape == (len(PROMPT) + 5, SHAPE.layers, EACH)
        assert (rows == expected).mean() >= (1.0 if EXACT or served.kind == "embedded" else 0.9)


@pytest.mark.parametrize("first", [1, 39, 40])
async def test_experts_begin_with_the_token_that_is_asked_for(served: Served, first: int):
    _, whole = await told(served)
    _, part = await told(served, routed_experts_start_len=first)

    assert np.array_equal(rows_of(part), rows_of(whole)[first:])


async def test_the_end_of_a_stream_tells_all_experts_and_one_who_did_not_ask_gets_none(served: Served):
    _, whole = await told(served)
    body = ask(input_ids=PROMPT, sampling_params=SAMPLING | {"stream_interval": 2}, stream=True)
    async with served.session() as session:
        async with session.post("/generate", json=body | {"return_routed_experts": True}) as response:
            last = events_in(await response.text())[-1]["meta_info"]
        async with session.post("/generate", json=body) as response:
            unasked = await response.text()

    assert np.array_equal(rows_of(last), rows_of(whole))
    assert not any(event["meta_info"].get("routed_experts") for event in events_in(unasked))


async def test_experts_follow_the_weights_that_are_loaded(served: Served, tmp_path: Path):
    other = tmp_path / "other"
    write_random_model(other, SHAPE, context=256, dtype="float32")
    try:
        assert (await update(served, other, "1"))[0] == 200
        tokens, meta = await told(served, extra_key="1")
    finally:
        await update(served, served.model, "none")

    expected = chosen(other, [*PROMPT, *tokens[:-1]])
    assert meta["weight_version"] == "1"
    assert (rows_of(meta) == expected).mean() >= (1.0 if EXACT or served.kind == "embedded" else 0.9)


async def update(served: Served, model: Path, version: str) -> tuple[int, Any]:
    body = {"model_path": str(model), "weight_version": version, "flush_cache": True, "load_format": "auto"}
    return await post(served, "/update_weights_from_disk", body)
