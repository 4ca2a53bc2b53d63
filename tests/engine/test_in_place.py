"""Weights that change under requests: which version each token has, and which tokens are in no answer."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.generator import Generator
from asyncrl.engine.request_options import RequestOptions
from benchmarks.engine import served
from harness.counting import IDS, Counting
from harness.models import make_endless_model
from harness.sglang_like import Asked, LikeSGLang, like_sglang
from topics.engines import EngineReady, EngineUpdating
from topics.trajectories import Answer

KEYS = ["0:0:made", "0:1:made", "0:2:made"]


def never(error: BaseException) -> None:
    raise error


def open_generator(address: str) -> tuple[Fleet, Generator]:
    fleet = Fleet(lambda _, address: EngineClient(address), counts={}, fail=never)
    fleet.apply(EngineReady("engine-1", address, 0, 0, "made", 32))
    return fleet, Generator(fleet, ModelInfo("any", 64, 1024), str, counts={}, manner=RequestOptions(in_place=True))


async def test_a_request_goes_on_under_the_new_weights_and_its_tokens_name_them(tmp_path: Path):
    for number in range(2):
        make_endless_model(tmp_path / str(number), seed=number + 1)
    async with served(tmp_path / "0", "--weight-version", KEYS[0], "--context-length", "1024") as address:
        fleet, generator = open_generator(address)
        control, watch = EngineClient(address), Counting(40)
        sampling = SamplingParams(600, temperature=0.0)
        pending = asyncio.create_task(generator.generate(IDS, sampling, watch=watch))
        async with asyncio.timeout(300):
            await watch.reached.wait()
            fleet.apply(EngineUpdating("engine-1", 0, 1))
            await control.pause("in_place")
            await control.update_weights(tmp_path / "1", KEYS[1], flush_cache=False)
            await control.continue_generation()
            fleet.apply(EngineReady("engine-1", address, 0, 1, "made", 32))
            answer = await pending
            later = await generator.generate(IDS, SamplingParams(5, temperature=0.0), watch=Counting())
        await control.close()
        await fleet.close()

    assert (watch.requests, answer.finish, len(answer.tokens), answer.hybrid) == (1, "length", 600, True)
    assert sorted({*answer.versions.tolist()}) == [0, 1]
    assert (np.diff(answer.versions) >= 0).all()
    assert (later.versions.tolist(), later.hybrid) == ([1] * 5, False)


@pytest.fixture
async def server() -> AsyncIterator[LikeSGLang]:
    async with like_sglang() as server:
        yield server


async def answer_of(server: LikeSGLang, labels: list[str]) -> tuple[Answer, Counting]:
    """The answer of a server that sends an event of four tokens with each of these labels, and no spans."""

    async def events(asked: Asked) -> AsyncIterator[dict[str, Any]]:
        server.events = server.one_event  # of the next request
        tokens = asked.tokens(4 * len(labels))
        for number, label in enumerate(labels):
            finish = "length" if number == len(labels) - 1 else None
            yield server.answer(asked, tokens[4 * number : 4 * number + 4], finish, weight_version=label)

    server.events, server.weight_version = events, KEYS[0]
    fleet, generator = open_generator(server.address)
    watch = Counting()
    async with asyncio.timeout(300):
        answer = await generator.generate(IDS, SamplingParams(4 * len(labels)), watch=watch)
    await fleet.close()
    return answer, watch


async def test_tokens_that_may_have_come_before_an_update_have_the_older_version(server: LikeSGLang):
    answer, watch = await answer_of(server, [KEYS[0], KEYS[1], KEYS[1], KEYS[2]])

    assert answer.versions.tolist() == [0] * 8 + [1] * 8
    assert (watch.requests, answer.hybrid) == (1, True)


async def test_a_request_that_met_no_update_is_not_hybrid(server: LikeSGLang):
    answer, _ = await answer_of(server, [KEYS[0], KEYS[0]])

    assert (answer.versions.tolist(), answer.hybrid) == ([0] * 8, False)


@pytest.mark.parametrize("label", ["default", "1:1:made", "0:0:other"])
async def test_weights_of_another_lineage_or_owner_have_no_token_in_an_answer(server: LikeSGLang, label: str):
    answer, watch = await answer_of(server, [KEYS[0], label, KEYS[0]])

    assert answer.versions.tolist() == [0] * 12
    assert watch.requests == 2
    assert len(server.asked[1].ids) == len(IDS) + 4
