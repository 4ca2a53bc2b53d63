"""The contract of a client with a server, against a real vLLM 0.32."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from asyncrl.config.settings import EngineSettings
from asyncrl.engine.client import Chunk, EngineRefused, SamplingParams
from asyncrl.engine.control import ServerSpec, open_control
from asyncrl.engine.errors import RequestFailed
from asyncrl.engine.vllm.client import VLLMClient
from asyncrl.engine.vllm.control import VLLMControl
from benchmarks.engine import save_random_model
from harness.client_contract import (  # noqa: F401 - pytest runs the imported cases
    begin,
    has_weights,
    test_a_halted_server_returns_every_token_and_samples_none_by_the_next_weights,
    test_a_pause_that_aborts_returns_partials_and_holds_later_requests,
    test_an_aborted_request_returns_what_it_has,
    test_chunks_add_up_to_the_generation,
    test_continue_without_a_pause_is_no_fault,
    test_generations_asked_for_together_end_apart,
    test_greedy_answers_of_both_kinds_agree,
    test_more_requests_than_slots_wait_and_all_are_answered,
    test_the_likeliest_tokens_in_the_places_of_sampled_ones,
    test_weights_come_out_of_the_memory_of_another_process,
    test_weights_come_over_a_group_in_several_calls_of_which_the_last_names_them,
)
from harness.contract import VOCAB, WHOLE_TOKENS, Served, widen
from harness.sglang_real import scores
from harness.stage import until
from harness.vllm_real import ABSENT, FOUND, vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOUND, reason=ABSENT)]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, VLLMControl]]:
    folder = tmp_path_factory.mktemp("contract")
    (folder / "model").mkdir()
    save_random_model(folder / "model", vocab=VOCAB, hidden=128, layers=2)
    widen(folder / "model")
    loop, stack = asyncio.new_event_loop(), contextlib.AsyncExitStack()
    # The test model has no tokenizer.
    entering = stack.enter_async_context(vllm_server(folder / "model", folder / "home", more=["--skip-tokenizer-init"]))
    control = loop.run_until_complete(entering)
    yield Served("vllm", True, control.address, folder / "model"), control
    loop.run_until_complete(stack.aclose())
    loop.close()


@pytest.fixture
def served(started: tuple[Served, VLLMControl]) -> Served:
    return started[0]


@pytest.fixture
async def client(served: Served) -> AsyncIterator[VLLMClient]:
    client = VLLMClient(served.address, api_key="secret")
    client.tracked = client.extended = True
    yield client
    await client.continue_generation()
    await client.empty()
    await client.update_weights(served.model, "none", flush_cache=True)
    await client.close()


@pytest.fixture
def folder(started: tuple[Served, VLLMControl]) -> Path:
    return started[0].model.parent


async def test_the_key_guards_everything_but_health(served: Served):
    async with aiohttp.ClientSession(served.address) as session:
        found = {}
        for method, path in (("GET", "/health"), ("GET", "/weight_info"), ("POST", "/pause"), ("GET", "/metrics")):
            async with session.request(method, path) as response:
                found[path] = response.status

    assert found == {"/health": 200, "/weight_info": 401, "/pause": 401, "/metrics": 401}


async def test_an_abort_of_one_leaves_the_others(client: VLLMClient):
    sampling = SamplingParams(WHOLE_TOKENS, ignore_eos=True)
    other = asyncio.create_task(client.generate([2], sampling))
    mine = asyncio.create_task(client.generate([1], sampling, on_tokens=lambda _: False))

    assert (await mine).finish_reason == "abort"
    assert (await other).finish_reason == "length"
    assert not (await client.load()).requests


async def test_prefixes_are_shared_within_an_extra_key_only(client: VLLMClient):
    prompt = list(range(1, 61)) * 10

    async def cached(key: str) -> int:
        return (await client.generate(prompt, SamplingParams(1), extra_key=key)).cached

    assert [await cached(key) for key in ("v1", "v2")] == [0, 0]
    assert min([await cached(key) for key in ("v1", "v2")]) >= 256


async def test_a_pause_that_keeps_requests_lets_them_end_under_the_new_weights(
    served: Served, client: VLLMClient, changed: tuple[Path, object, object]
):
    chunks: list[Chunk] = []
    begun = asyncio.Event()

    def take(chunk: Chunk) -> None:
        chunks.append(chunk)
        begun.set()

    sampling = SamplingParams(WHOLE_TOKENS, ignore_eos=True)
    call = asyncio.create_task(client.generate([1, 2], sampling, on_tokens=take))
    await begun.wait()
    await client.pause("in_place")
    assert await client.health()
    with pytest.raises(RequestFailed):
        await client.update_weights(served.model / "absent", "1", flush_cache=False)
    assert await client.label() == "none"
    await client.update_weights(changed[0], "1", flush_cache=False)
    assert await client.label() == "1" and not call.done()
    await client.continue_generation()
    generation = await call

    assert (generation.finish_reason, len(generation.token_ids)) == ("length", WHOLE_TOKENS)
    old, new = generation.weight_versions
    assert (old.version, old.start, new.version, new.end) == ("none", 0, "1", WHOLE_TOKENS)
    assert all(chunk.reported for chunk in chunks if chunk.weight_version == "1")
    tokens = generation.token_ids.tolist()
    before = scores(served.model, [1, 2], tokens)[: old.end]
    assert np.abs(before - generation.logprobs[: old.end]).max() < 1e-4


async def test_weights_from_files_are_those_of_the_next_tokens(
    served: Served, client: VLLMClient, changed: tuple[Path, object, object]
):
    await client.pause("abort")
    await client.update_weights(changed[0], "1", flush_cache=False)
    await client.continue_generation()

    assert await has_weights(served, client, changed[0])
    assert not await has_weights(served, client, served.model)


async def test_a_transfer_that_breaks_off_leaves_the_weights(
    served: Served, client: VLLMClient, changed: tuple[Path, object, object]
):
    with pytest.raises(RequestFailed):
        await client.update_from_memory(b"no tensors", "1")

    assert await client.label() == "none"
    assert await has_weights(served, client, served.model)
    await client.update_weights(changed[0], "1", flush_cache=True)
    assert await has_weights(served, client, changed[0])


async def test_a_server_that_slept_has_no_version_until_the_next_update(served: Served, client: VLLMClient):
    await client.name_weights("0:1:first")
    await client.pause("abort")
    await client.release_memory()
    await client.resume_memory()
    assert await client.label() == "none"
    await client.update_weights(served.model, "0:2:second", flush_cache=False)
    await client.continue_generation()

    assert await has_weights(served, client, served.model)


async def test_a_request_that_arrives_while_the_server_is_held_is_sent_back(
    started: tuple[Served, VLLMControl], folder: Path
):
    settings = EngineSettings(kind="vllm", addresses=[started[0].address], api_key_file=str(folder / "home" / "key"))
    control = open_control(ServerSpec("engine-1", settings, started[0].model, folder / "log", folder / "home" / "key"))
    await control.start()
    client = VLLMClient(started[0].address, api_key="secret")
    await control.hold()
    late = asyncio.create_task(client.generate([1, 2, 3], SamplingParams(4, ignore_eos=True)))
    client.tracked = True

    async def is_there() -> bool:
        return (await client.load()).requests == 1

    await until(is_there, "the request")
    await control.load_weights(started[0].model, "0:1:first")
    await control.resume()
    generation = await late
    confirmed = await control.weights()
    await client.close()
    await control.close()

    assert (generation.finish_reason, len(generation.token_ids)) == ("abort", 0)
    assert confirmed == ("0:1:first", "") and not control.own


async def test_a_request_that_cuts_the_distribution_is_refused(client: VLLMClient):
    with pytest.raises(EngineRefused, match="top_p"):
        await client.generate([1], SamplingParams(4, top_p=0.9))
