"""Memory of keys and values that is full, prompts that take several steps, and turns of the event loop in a step."""

import asyncio

import numpy as np
import pytest
import torch

from asyncrl.engine.embedded import model as forward
from asyncrl.engine.embedded.budget import in_blocks
from asyncrl.engine.embedded.paged import Paged
from asyncrl.engine.embedded.request import Request, Sampling
from asyncrl.engine.embedded.scheduler import Engine
from asyncrl.engine.errors import EngineError, EngineRefused
from benchmarks.engine import save_random_model

VOCAB = 64


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    torch.set_num_threads(1)
    found = tmp_path_factory.mktemp("model")
    save_random_model(found, vocab=VOCAB, hidden=32, layers=2)
    return found


def ask(rid, tokens=40, **sampling):
    prompt = np.random.default_rng(int(rid)).integers(0, VOCAB, tokens).tolist()
    return Request(rid, prompt, Sampling(sampling_seed=int(rid), **sampling))


def finish(engine, requests):
    for request in requests:
        engine.submit(request)
    while engine.runnable:
        engine.step()
        held = sum(in_blocks(len(one.prompt) + len(one.tokens) - 1) for one in engine.running)
        assert held + len(engine.cache) <= engine.budget_tokens
    return requests


def test_requests_wait_or_give_way_where_memory_is_full_and_get_the_same_tokens(directory):
    free, full = (Engine(directory, max_running=4, context_length=128) for _ in range(2))
    full.budget_tokens = 160

    wanted = finish(free, [ask(str(number), max_new_tokens=60) for number in range(6)])
    found = finish(full, [ask(str(number), max_new_tokens=60) for number in range(6)])

    assert [request.tokens for request in found] == [request.tokens for request in wanted]
    assert full.counters.retractions
    assert not free.counters.retractions


@pytest.mark.parametrize("tokens", [40, 63])
def test_a_single_request_ends_where_memory_does_and_a_prompt_beyond_it_is_refused(directory, tokens):
    engine = Engine(directory, max_running=4, context_length=256)
    engine.budget_tokens = 64

    [request] = finish(engine, [ask("1", tokens, max_new_tokens=80)])

    assert (request.finish.type, len(request.prompt) + len(request.tokens)) == ("length", 65)
    with pytest.raises(EngineRefused, match="its prompt has 64 tokens, and the memory for keys and values holds 64"):
        engine.submit(ask("2", 64))


def test_a_long_prompt_takes_several_steps_in_which_others_get_their_tokens(directory):
    engine = Engine(directory, max_running=4, context_length=2048)
    quick, late = ask("1", max_new_tokens=40), ask("2", 1600, max_new_tokens=4)
    engine.submit(quick)
    engine.step()

    engine.submit(late)
    counts = []
    while not late.tokens:
        engine.step()
        counts.append(len(quick.tokens))

    assert counts == [2, 3, 4, 5]


async def test_requests_come_while_a_step_computes_and_what_ends_them_waits_for_its_end(directory, monkeypatch):
    monkeypatch.setattr(forward, "_TURN_S", -1.0)  # the event loop has a turn after each layer
    engine = Engine(directory, max_running=4, context_length=128)
    first, second = ask("0", max_new_tokens=60), ask("1", max_new_tokens=60)
    engine.submit(first)
    task = asyncio.create_task(engine.run())
    await asyncio.sleep(0)  # it began to compute the first layer
    assert engine.computing

    engine.submit(second)
    engine.abort("0")
    engine.pause("retract")
    assert first.finish is None
    assert engine.paused is None
    await engine.settled()

    assert (first.finish.type, len(first.tokens)) == ("abort", 1)
    assert [*engine.waiting] == [second]
    assert engine.paused == "retract"
    task.cancel()


def test_memory_is_taken_where_it_is_written_and_given_back():
    paged = Paged((1 << 20, 1 << 16), torch.float32)  # 256 GiB

    paged.tensor[7] = 1.0
    paged.free(7 << 16, 1 << 16)

    assert paged.tensor[6:8].abs().sum() == 0
    with pytest.raises(EngineError, match=r"lower engine\.max_running or engine\.context"):
        Paged((1 << 50,), torch.float32)
