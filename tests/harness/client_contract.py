"""Cases of the contract that speak to a server through the product's client: the same for each kind of servers."""

import asyncio
import itertools
import secrets
from functools import partial
from pathlib import Path

import numpy as np
import torch

from asyncrl.engine.client import Chunk, EngineClient, SamplingParams
from asyncrl.ports import free_port
from asyncrl.weights.shared import View, keep_for_reader, pack_tensors, shared_memory
from asyncrl.weights.transfer import TransferGroup
from asyncrl.weights.transfer_manifest import GroupPlace
from harness.contract import LONG_TOKENS, Served
from harness.sglang_real import EXACT, post, scores


async def begin(client, tokens=LONG_TOKENS):
    """A generation that has its first tokens."""
    begun, sampling = asyncio.Event(), SamplingParams(tokens, ignore_eos=True)
    call = asyncio.create_task(client.generate([1], sampling, on_tokens=lambda _: begun.set(), stream_interval=1))
    async with asyncio.timeout(300):
        await begun.wait()
    return call


async def test_greedy_answers_of_both_kinds_agree(served, client):
    asked = [list(range(1 + start, 9 + start)) for start in range(6)]
    generations = await asyncio.gather(*(client.generate(ids, SamplingParams(8, temperature=0.0)) for ids in asked))

    for ids, generation in zip(asked, generations, strict=True):
        expected = scores(served.model, ids, generation.token_ids.tolist())
        assert np.abs(expected - generation.logprobs).max() < (1e-3 if EXACT or served.kind == "embedded" else 0.1)


async def test_the_likeliest_tokens_in_the_places_of_sampled_ones(client):
    chunks = []
    asked = {"on_tokens": chunks.append, "stream_interval": 2}
    for options in ({}, asked):
        generation = await client.generate([3, 1, 4], SamplingParams(5, top=3), **options)
        places = generation.likeliest
        assert len(places) == len(generation.token_ids) and all(len(place) == 3 for place in places)
        for place, token, logprob in zip(places, generation.token_ids.tolist(), generation.logprobs, strict=True):
            values = [value for _, value in place]
            assert values == sorted(values, reverse=True) and logprob <= values[0] + 1e-3
            assert all(abs(value - logprob) < 1e-3 for other, value in place if other == token)
    assert [place for chunk in chunks for place in chunk.likeliest] == places


async def test_an_aborted_request_returns_what_it_has(served, client):
    call = await begin(client)
    await client.abort_all()
    generation = await call

    assert generation.finish_reason == "abort"
    assert 0 < len(generation.token_ids) == len(generation.logprobs) < LONG_TOKENS
    assert {span.version for span in generation.weight_versions} == {"none"}
    await client.wait_idle(60)


async def test_a_pause_that_aborts_returns_partials_and_holds_later_requests(served, client):
    call = await begin(client)
    await client.pause("abort")
    first = await call
    later = asyncio.create_task(client.generate([2], SamplingParams(3)))
    await client.update_weights(served.model, "1", flush_cache=True)
    assert not later.done()
    await client.continue_generation()

    assert (first.finish_reason, {span.version for span in first.weight_versions}) == ("abort", {"none"})
    assert {span.version for span in (await later).weight_versions} == {"1"}


async def test_continue_without_a_pause_is_no_fault(served, client):
    await client.continue_generation()


async def test_chunks_add_up_to_the_generation(served, client):
    chunks = []

    generation = await client.generate([1, 2], SamplingParams(11), on_tokens=chunks.append, stream_interval=4)

    assert np.concatenate([chunk.token_ids for chunk in chunks]).tolist() == generation.token_ids.tolist()
    assert np.concatenate([chunk.logprobs for chunk in chunks]).tolist() == generation.logprobs.tolist()
    least = 1 if served.kind == "vllm" else 2  # vLLM has one interval for all requests
    assert len(chunks) >= least and {chunk.weight_version for chunk in chunks} == {"none"}


async def test_generations_asked_for_together_end_apart(served, client):
    ended = []

    async def one(length):
        await client.generate([length], SamplingParams(length, ignore_eos=True))
        ended.append(length)

    lengths = [60, 3, 30, 9, 15]
    await asyncio.gather(*map(one, lengths))

    assert ended == sorted(lengths)


async def test_more_requests_than_slots_wait_and_all_are_answered(served, client):
    answers = await asyncio.gather(
        *(client.generate([i % 60], SamplingParams(1 + i % 5), extra_key=str(i % 2)) for i in range(60))
    )

    assert [len(answer.token_ids) for answer in answers] == [1 + i % 5 for i in range(60)]


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
    if served.kind == "vllm":  # it answers alike whether it had joined the group or not
        return await client.leave_group(place.name)
    left = [await post(served, "/destroy_weights_update_group", {"group_name": place.name}) for _ in range(2)]
    assert [(status, answer.keys(), answer["success"]) for status, answer in left] == [
        (200, {"success", "message"}, True),
        (400, {"success", "message"}, False),
    ]
    assert left[1][1]["message"] == "The group to be destroyed does not exist."
