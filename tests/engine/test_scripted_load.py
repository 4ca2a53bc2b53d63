"""The scripted engine whose rate follows its load."""

import asyncio
import random

import numpy as np

from asyncrl.engine.client import Chunk, SamplingParams
from asyncrl.engine.scripted.load_client import Lengths, ScriptedLoadClient
from asyncrl.engine.scripted.rate_curve import SGLANG_0_6B, RateCurve
from harness.stage import until

PROMPT = np.array([1, 2, 3], np.int32)


def client(token_s: float = 1e-3, sigma: float = 0.0) -> ScriptedLoadClient:
    """One that gives each request a token in this time, with answers of 100 tokens."""
    made = ScriptedLoadClient(RateCurve(token_s, 0.0, 0.0), Lengths(100, sigma), slots=8, update_s=0.0)
    made.announced("0:1:a")
    return made


def test_the_curve_follows_the_measured_server():
    measured = {(256, 85_000): 26_000, (256, 225_000): 15_000, (109, 185_000): 13_500, (10, 10_000): 3_300}

    for (running, cached), rate in measured.items():
        assert abs(SGLANG_0_6B.tokens_per_s(running, cached) / rate - 1) < 0.03


async def test_requests_get_the_lengths_of_their_seeds_in_the_time_of_the_curve():
    engine = client()
    began = asyncio.get_running_loop().time()

    answers = await asyncio.gather(
        *(engine.generate(PROMPT, SamplingParams(max_new_tokens=500, seed=seed)) for seed in range(4))
    )

    assert [len(answer.token_ids) for answer in answers] == [100] * 4
    assert asyncio.get_running_loop().time() - began > 0.09
    await engine.close()


async def test_tokens_have_the_version_that_was_current_and_come_in_order():
    engine, chunks = client(), list[Chunk]()
    task = asyncio.create_task(
        engine.generate(PROMPT, SamplingParams(max_new_tokens=500, seed=1), on_tokens=chunks.append)
    )
    await until(lambda: sum(len(chunk.token_ids) for chunk in chunks) >= 30, "some tokens came")
    engine.announced("0:2:b")

    answer = await task

    assert [span.version for span in answer.weight_versions] == ["0:1:a", "0:2:b"]
    assert np.concatenate([chunk.token_ids for chunk in chunks]).tolist() == answer.token_ids.tolist()
    await engine.close()


async def test_a_request_that_continues_an_answer_has_the_rest_of_its_tokens():
    engine, chunks = client(sigma=0.8), list[Chunk]()
    whole = Lengths(100, 0.8).draw(random.Random(5), 500)
    sampling = SamplingParams(max_new_tokens=500, seed=5)
    task = asyncio.create_task(engine.generate(PROMPT, sampling, on_tokens=chunks.append, stream_interval=4))
    await until(lambda: bool(chunks), "a token came")
    task.cancel()
    had = sum(len(chunk.token_ids) for chunk in chunks)
    longer = np.concatenate([PROMPT, *(chunk.token_ids for chunk in chunks)])

    rest = await engine.generate(longer, SamplingParams(max_new_tokens=500 - had, seed=5))

    assert had + len(rest.token_ids) == whole
    await engine.close()
