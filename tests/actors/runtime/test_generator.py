"""One generation on a real engine, disturbed wherever it can be: it ends as an undisturbed one does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.runtime.generator import Asker, Generator
from asyncrl.bus.connection import Bus
from asyncrl.engine.client import SamplingParams
from asyncrl.engine.errors import EngineRefused
from benchmarks.engine import served
from harness.models import make_endless_model
from harness.stage import Stage, until
from harness.workers import KEY, Worker
from topics.prompts import PromptRow
from topics.trajectories import Answer

CONTEXT = 128  # of the server
PROMPT = "^abcdef="


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_endless_model(directory)
    return directory


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    """A server for all tests of this file."""
    loop = asyncio.new_event_loop()
    stack = contextlib.AsyncExitStack()
    yield loop.run_until_complete(stack.enter_async_context(served(model, "--weight-version", KEY)))
    loop.run_until_complete(stack.aclose())
    loop.close()


@pytest.fixture
async def worker(bus: Bus, stage: Callable[..., Stage], model: Path, address: str) -> AsyncIterator[Worker]:
    """A worker whose engine has a context that is smaller than the model's."""
    made = stage(
        model={"path": str(model)},
        engine={"context": CONTEXT},
        rollout={"temperature": 0.0, "max_new_tokens": 100},
    )
    worker = Worker(bus, made)
    await worker.start()
    await worker.ready(address)
    yield worker
    await worker.stop()


class Wasteful(Asker):
    """Counts what belongs to no answer."""

    wasted = 0

    def discarded(self, tokens: int) -> None:
        self.wasted += tokens


class Sampling:
    """Answers to one prompt on the worker's engine."""

    def __init__(self, worker: Worker, *, streamed: bool) -> None:
        self.asker = asker = Wasteful()
        asker.quiet_tokens, asker.chunk_tokens = (0, 5) if streamed else (1000, 16)
        tools = worker.worker.tools
        self.tokenizer = tools.tokenizer
        self._generator = Generator(worker.context, tools.pool, tools.tokenizer, tools.served, asker)

    async def extend(
        self, answer: Answer, *, most: int = 60, stop: tuple[str, ...] = (), prompt: str = PROMPT
    ) -> Answer:
        ids = self.tokenizer.encode(prompt)
        await self._generator.extend(ids, answer, SamplingParams(most, temperature=0.0, stop=list(stop)), 0)
        return answer


def cut(answer: Answer, tokens: int) -> Answer:
    """What is known of an answer after so many tokens."""
    part = slice(0, tokens)
    return Answer(
        "generate",
        "",
        done=False,
        tokens=answer.tokens[part].copy(),
        logprobs=answer.logprobs[part].copy(),
        versions=answer.versions[part].copy(),
    )


def stop_inside(text: str, length: int) -> tuple[str, int]:
    """A piece of a text that is there once up to its end, and where it ends."""
    for end in range(length + 4, len(text)):
        piece = text[end - length : end]
        if text.find(piece) == end - length:
            return piece, end
    pytest.fail(f"no piece of {length} letters is new in {text!r}")


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_stop_string_is_found_across_every_resumption(worker: Worker, streamed: bool):
    sampling = Sampling(worker, streamed=streamed)
    free = await sampling.extend(Answer("generate", "", done=False))
    stop, end = stop_inside(sampling.tokenizer.decode_all(free.tokens.tolist()), 4)
    undisturbed = await sampling.extend(Answer("generate", "", done=False), stop=("never", stop))
    assert (len(undisturbed.tokens), undisturbed.finish) == (end, "stop")
    assert free.tokens[:end].tolist() == undisturbed.tokens.tolist()

    for known in range(1, end):
        resumed = await sampling.extend(cut(undisturbed, known), stop=("never", stop))

        assert resumed.tokens.tolist() == undisturbed.tokens.tolist(), f"cut after {known} of {end} tokens"
        assert (resumed.finish, len(resumed.versions)) == ("stop", end)
        np.testing.assert_allclose(resumed.logprobs, undisturbed.logprobs, atol=1e-4)
    assert sampling.asker.wasted > 0  # the engine went on past a stop string that began before its request


async def test_what_would_exceed_the_context_ends_there_as_length(worker: Worker):
    sampling = Sampling(worker, streamed=False)

    whole = await sampling.extend(Answer("generate", "", done=False), most=500)
    resumed = await sampling.extend(cut(whole, 50), most=500)
    full = await sampling.extend(cut(whole, CONTEXT - len(PROMPT)), most=500)

    assert (len(whole.tokens), whole.finish) == (CONTEXT - len(PROMPT), "length")
    assert resumed.tokens.tolist() == full.tokens.tolist() == whole.tokens.tolist()
    assert resumed.finish == full.finish == "length"
    with pytest.raises(EngineRefused, match="the prompt has 128 tokens; a context of 128 takes 1 to 127"):
        await sampling.extend(Answer("generate", "", done=False), prompt="a" * CONTEXT)


async def test_a_conversation_that_reaches_the_context_is_truncated_and_not_refused(worker: Worker):
    finishes: list[tuple[str, int]] = []

    async def talk(row: PromptRow, context: Any) -> None:
        tokens = context.tokenizer.encode_prompt(row, max_tokens=None).tolist()
        while not finishes or finishes[-1][1]:
            answer = await context.generate(tokens, max_new_tokens=50)
            finishes.append((answer.finish, len(answer.tokens)))
            tokens += [*answer.tokens.tolist(), 5, 6, 7]

    worker.worker.tools = worker.worker.tools._replace(function=talk)
    await worker.issue("p000001-0", prompt=PROMPT)

    await until(lambda: "p000001-0" in worker.results or bool(worker.failures), "its end")
    assert not worker.failures
    assert finishes == [("length", 50), ("length", 50), ("length", CONTEXT - len(PROMPT) - 2 * 53), ("length", 0)]
    result = worker.results["p000001-0"]
    assert result.truncated
    assert result.segments[0].mask.sum() == CONTEXT - len(PROMPT) - 6
