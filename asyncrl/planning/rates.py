"""The rates of one server and one rank on the rows of a config."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from asyncrl.algorithms.rows import TrainRow
from asyncrl.background import sleep_unless_failed
from asyncrl.config.engine_settings import Capability
from asyncrl.config.pools import purpose_of
from asyncrl.config.settings import Config
from asyncrl.config.tasks import largest_group, rows_of, tasks_of
from asyncrl.config.trainers import trainer_kind
from asyncrl.data.row_maker import sample_rows
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.answer import Chunk
from asyncrl.engine.client import SamplingParams
from asyncrl.engine.clients import open_client
from asyncrl.engine.control import ServerSpec, open_control
from asyncrl.engine.fleet import Sampler
from asyncrl.errors import AsyncRLError
from asyncrl.run.directory import RunFiles
from asyncrl.training.objective import objective_of
from topics.wire import Int32Array

_ROWS, _READ_S = 512, 5.0
_LEAST = 8  # requests, and rows of a step
_GAIN = 1.03  # of twice as many requests, or the search ends
_SETTLE = 4  # tokens of each request before a window begins: all prompts are computed then
_MEASURED = 0.6  # part of the time that windows take
_INTERVAL = 4  # tokens that are counted at a time
_LOOK_S = 0.02
_STEPS = 3  # that are timed


class PlanError(AsyncRLError):
    """A rate could not be measured."""


class EngineRate(NamedTuple):
    """The rates of one server."""

    tokens_per_s: dict[int, float]  # by concurrent requests
    sampled: list[tuple[int, int]]  # tokens of prompts and their answers


async def prompts_of(config: Config, files: RunFiles) -> list[Int32Array]:
    """Return prompts of the first task, each as tokens."""
    task = next(iter(tasks_of(config).values()))
    _, rows = await sample_rows(rows_of(config, files.base, task), _ROWS, _READ_S)
    tokenizer = TaskTokenizer.load(files.model_path(config.model))
    return [tokenizer.encode_prompt(row, max_tokens=None) for row in rows]


async def engine_rate(config: Config, files: RunFiles, prompts: Sequence[Int32Array], seconds: float) -> EngineRate:
    """Start the first server that samples for training, and measure it with more and more requests.

    A task's own rollout function is not run: each request is one answer to a prompt.

    Args:
        config: of the run.
        files: a scratch directory with the model.
        prompts: tokens of prompts.
        seconds: of all windows together, after the start.

    Raises:
        EngineFailed, EngineError: it does not start, or refuses a request.
    """
    pool, group = next(pair for pair in config.engine.pools.items() if purpose_of(config, pair[0]) == "training")
    engine_id = f"{pool}-1"
    if group.can(Capability.PROCESSES):
        files.make_engine_key()
    key_file = files.engine_key_file(config.engine, engine_id)
    log_file = files.logs / f"{engine_id}.log"
    server = open_control(ServerSpec(engine_id, config.engine, files.model_path(config.model), log_file, key_file))
    try:
        await server.start()
        client = open_client(config.engine, engine_id, server.address, key_file)
        try:
            return await _sweep(client, _Requests(config, files, prompts), group.max_running, seconds)
        finally:
            await client.close()
    finally:
        await server.close()


class _Requests:
    """Requests without end, and their tokens."""

    def __init__(self, config: Config, files: RunFiles, prompts: Sequence[Int32Array]) -> None:
        rollout, stop_ids = config.rollout, TaskTokenizer.load(files.model_path(config.model)).stop_ids
        self._params = SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=next(iter(tasks_of(config).values())).temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop=rollout.stop,
            stop_token_ids=stop_ids,
        )
        self._prompts: Iterator[Int32Array] = itertools.cycle(prompts)
        self.tokens = 0
        self.sampled: list[tuple[int, int]] = []

    async def ask(self, client: Sampler) -> None:
        """Send request after request."""
        while True:
            await self.answer(client)

    async def answer(self, client: Sampler) -> None:
        """Send one request."""
        prompt = next(self._prompts)
        answer = await client.generate(prompt, self._params, on_tokens=self._count, stream_interval=_INTERVAL)
        self.sampled.append((len(prompt), len(answer.token_ids)))

    def _count(self, chunk: Chunk) -> None:
        self.tokens += len(chunk.token_ids)


async def _sweep(client: Sampler, requests: _Requests, most: int, seconds: float) -> EngineRate:
    doubled = itertools.takewhile(lambda count: count < most, (_LEAST << n for n in itertools.count()))
    counts = [*doubled, most]
    rates: dict[int, float] = {}
    asking: list[asyncio.Task[None]] = []
    await asyncio.gather(*(requests.answer(client) for _ in range(_LEAST)))  # the first ones of a server are slow
    deadline = time.monotonic() + seconds
    try:
        for count in counts:
            asking += [asyncio.create_task(requests.ask(client)) for _ in range(count - len(asking))]
            settled = requests.tokens + _SETTLE * count
            while requests.tokens < settled and time.monotonic() < deadline:
                await sleep_unless_failed(asking, _LOOK_S)
            if rates and time.monotonic() >= deadline:
                break
            began, before = time.monotonic(), requests.tokens
            await sleep_unless_failed(asking, _MEASURED * seconds / len(counts))
            rates[count] = (requests.tokens - before) / (time.monotonic() - began)
            if rates[count] < _GAIN * rates.get(count // 2, 0.0):
                break
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    if not any(rates.values()):
        raise PlanError(f"the engine sampled no token in {seconds:.0f} s; give it more time with --seconds")
    return EngineRate(rates, requests.sampled)


def trainer_rate(config: Config, files: RunFiles, sampled: Sequence[tuple[int, int]], seconds: float) -> float:
    """Return the answer tokens per second of one rank on rows of these lengths.

    Args:
        config: of the run.
        files: a scratch directory with the model.
        sampled: tokens of prompts and their answers.
        seconds: of all steps together, after the model was loaded. A step has fewer rows than a batch if a batch takes
            too long.

    Raises:
        AsyncRLError: the trainer needs something that only a run has, such as a teacher's log-probs.
    """
    trainer = trainer_kind(config.learner.trainer).open(config, files.model_path(config.model), files.base)
    objective = objective_of(config, 1)
    trainer.compile_for(objective)
    lengths = _lengths(sampled, config.buffer.batch_groups * largest_group(config))

    def timed(rows: Sequence[TrainRow]) -> float:
        began = time.monotonic()
        trainer.step(rows, objective)
        return time.monotonic() - began

    few = [_row(*one) for one in lengths[:_LEAST]]
    timed(few)
    each = timed(few) / len(few)
    count = min(len(lengths), max(len(few), int(seconds / (_STEPS * each))))
    step_s = statistics.median(timed([_row(*one) for one in lengths[:count]]) for _ in range(_STEPS))
    return sum(answer for _, answer in lengths[:count]) / step_s


def _lengths(sampled: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    if not any(answer for _, answer in sampled):
        raise PlanError("no answer ended in the time; give it more with --seconds")
    return random.Random(0).choices([one for one in sampled if one[1]], k=count)


def _row(prompt: int, answer: int) -> TrainRow:
    tokens = prompt + answer
    mask = np.concatenate([np.zeros(prompt, np.uint8), np.ones(answer, np.uint8)])
    return TrainRow(
        trajectory_id="",
        tokens=np.full(tokens, 3, np.int32),
        mask=mask,
        logprobs=-mask.astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.ones(tokens, np.float32),
        weights=np.full(tokens, 1 / tokens, np.float32),
    )
