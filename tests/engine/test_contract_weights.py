"""Weights that reach the embedded engine and a real SGLang 0.5.17 past their files: the same cases against both."""

import asyncio
import itertools
import secrets
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.engine.client import Chunk, EngineClient, EngineRefused, SamplingParams
from asyncrl.ports import free_port
from asyncrl.weights.shared import View, keep_for_reader, pack_tensors, shared_memory
from asyncrl.weights.transfer import TransferGroup
from asyncrl.weights.transfer_manifest import Described, GroupPlace
from harness.contract import Served
from harness.sglang_real import EXACT, post, scores

pytestmark = pytest.mark.slow


@pytest.fixture
def changed(served: Served, tmp_path: Path) -> tuple[Path, list[Described], dict[str, torch.Tensor]]:
    """The served model with other weights: its directory, and its tensors as calls describe them."""
    shutil.copytree(served.model, tmp_path / "changed")
    file = tmp_path / "changed" / "model.safetensors"
    tensors = {name: tensor * 1.5 for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    described = [Described(name, "float32", list(one.shape), one.nbytes) for name, one in tensors.items()]
    return tmp_path / "changed", described, tensors


async def has_weights(served: Served, client: EngineClient, model: Path) -> bool:
    """Return whether the log-probs of an answer are those of a model."""
    generation = await client.generate([1, 2, 3], SamplingParams(8, temperature=0.0), extra_key=secrets.token_hex(4))
    expected = scores(model, [1, 2, 3], generation.token_ids.tolist())
    return bool(np.abs(expected - generation.logprobs).max() < (1e-3 if EXACT or served.kind == "embedded" else 0.1))


async def test_a_halted_server_returns_every_token_and_samples_none_by_the_next_weights(
    served: Served, client: EngineClient
):
    seen, begun = [0] * 6, asyncio.Event()

    def count(number: int, chunk: Chunk) -> None:
        seen[number] += len(chunk.token_ids)
        if all(seen):
            begun.set()

    sampling = SamplingParams(100, ignore_eos=True)
    calls = [
        asyncio.create_task(
            client.generate([1 + number], sampling, on_tokens=partial(count, number), stream_interval=1)
        )
        for number in range(len(seen))
    ]
    async with asyncio.timeout(300):
        await begun.wait()
    had = list(seen)
    await client.halt()
    await client.update_weights(served.model, "1", flush_cache=False)
    await client.continue_generation()
    generations = await asyncio.gather(*calls)

    for before, generation in zip(had, generations, strict=True):
        assert before <= len(generation.token_ids) == len(generation.logprobs)
        assert {span.version for span in generation.weight_versions} == {"none"}
    assert len((await client.generate([1], SamplingParams(3, ignore_eos=True))).token_ids) == 3


async def test_weights_come_over_a_group_in_several_calls_of_which_the_last_names_them(served, client, changed):
    model, described, tensors = changed
    place = GroupPlace("gloo", "127.0.0.1", free_port(), secrets.token_hex(4), 2)
    joined = asyncio.create_task(asyncio.to_thread(TransferGroup, place, 0, timeout_s=60.0))
    await client.join_group(place)
    group, half = await joined, len(described) // 2
    await client.pause("in_place")
    for part, version in ((described[:half], None), (described[half:], "1")):
        assert (await client.model_info())["weight_version"] == "none"
        sent = asyncio.to_thread(group.broadcast, [tensors[one.name] for one in part])
        await asyncio.gather(sent, client.update_from_group(place.name, part, version))
    await client.continue_generation()

    assert (await client.model_info())["weight_version"] == "1"
    assert await has_weights(served, client, model)
    assert not await has_weights(served, client, served.model)
    left = [await post(served, "/destroy_weights_update_group", {"group_name": place.name}) for _ in range(2)]
    assert [(status, answer.keys(), answer["success"]) for status, answer in left] == [
        (200, {"success", "message"}, True),
        (400, {"success", "message"}, False),
    ]
    assert left[1][1]["message"] == "The group to be destroyed does not exist."


async def test_weights_come_out_of_the_memory_of_another_process(served, client, changed):
    model, described, tensors = changed
    ends = list(itertools.accumulate(one.bytes for one in described))
    memory = shared_memory(ends[-1], torch.device("cpu"))
    for one, end in zip(described, ends, strict=True):
        memory[end - one.bytes : end] = tensors[one.name].reshape(-1).view(torch.uint8)
    views = [
        View(one.name, torch.float32, tuple(one.shape), end - one.bytes)
        for one, end in zip(described, ends, strict=True)
    ]
    await client.pause("in_place")
    keep_for_reader(memory)
    [packed] = pack_tensors(memory, [views])
    await client.update_from_memory(packed, "1")
    memory.zero_()  # it was copied
    await client.continue_generation()

    assert (await client.model_info())["weight_version"] == "1"
    assert await has_weights(served, client, model)


async def test_a_group_of_an_unknown_kind_is_refused_and_the_weights_stay(served, client):
    place = GroupPlace("pigeon", "127.0.0.1", free_port(), "absent", 2)
    store = torch.distributed.TCPStore(place.address, place.port, 2, True, wait_for_workers=False)
    with pytest.raises(EngineRefused):
        await client.join_group(place)
    del store

    assert (await client.model_info())["weight_version"] == "none"
    assert await has_weights(served, client, served.model)
