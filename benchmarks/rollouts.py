"""Tokens per second of a server through asyncrl, and of the same requests from a bare client."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from asyncrl.background import sleep_unless_failed
from asyncrl.bus.log import Record
from asyncrl.config.engine_settings import Capability, kind_of
from asyncrl.config.settings import Config
from asyncrl.engine.client import EngineClient
from asyncrl.engine.control import read_key
from benchmarks.random_model import SHAPES, Served, dtype_of
from benchmarks.stage import BenchError, Stage, bench_config, report
from topics.engines import ENGINE_READY, EngineReady
from topics.topic import ENGINES, TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED, TrajectoryGenerated
from topics.wire import decode

_PROMPT = [29, 3, 4, 5, 6, 7, 8, 28]  # as long as a row of the task
_GROUP, _BATCHES = 8, 1000  # a batch that no window fills, so a window has no step and no new weights
_MODULE = """
import asyncio, itertools, json, os

def number_of_worker():
    for number in itertools.count():
        try:
            os.mkdir({folder!r} + f"/worker-{{number}}")
        except FileExistsError:
            continue
        return number

async def look():
    await asyncio.sleep({tool_s})

lengths = itertools.cycle(json.loads({lengths!r})[number_of_worker() % {workers}])

async def rollout(row, context):
    tokens = context.tokenizer.encode_prompt(row, max_tokens=None).tolist()
    for turn, length in enumerate(next(lengths)):
        if turn:
            await context.tool("look", look)
        generated = await context.generate(tokens, max_new_tokens=length)
        tokens += generated.tokens.tolist()
"""
_DEADLINE_S = 900.0
_LOOK_S = 0.02  # between two polls of the ended trajectories
_TRAJECTORIES = 2_000  # of a worker; then they repeat


class Load(NamedTuple):
    """The requests of a measurement."""

    concurrent: int  # trajectories
    workers: int  # rollout workers that share them
    tokens: int  # mean of a generation; uniform between 0.5 and 1.5 times this number
    turns: int  # generations of a trajectory
    tool_s: float  # between two turns

    @property
    def slots(self) -> int:
        """Return the trajectories of a worker."""
        return -(-self.concurrent // self.workers)

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the least and greatest number of tokens of a generation."""
        return max(1, self.tokens // 2), self.tokens + self.tokens // 2


def _lengths(load: Load, worker: int) -> list[list[int]]:
    """Return the tokens of each generation of a worker's trajectories, the same in each window.

    The lengths are fixed because the server's cost per token depends on the requests in progress. With long
    generations, new random lengths would change the rate by more than the measured difference.

    Args:
        worker: number of the worker, from 0.
    """
    draw = random.Random(worker).randint
    least, most = load.bounds
    found = []
    for number in range(_TRAJECTORIES):
        # the rest of a trajectory that seems to have begun earlier: otherwise all would end together
        rest = number < load.slots
        turns = draw(1, load.turns) if rest else load.turns
        found.append([draw(1 if rest and not turn else least, most) for turn in range(turns)])
    return found


class Window(NamedTuple):
    """The end of a window."""

    seconds: float
    ends: int = 0  # trajectories after which the window ends; 0: after `seconds`


class Course(NamedTuple):
    """The windows of a measurement."""

    seconds: float  # of the first window
    rounds: int
    routing: bool  # each round has one more window, whose requests ask for the experts of each token


async def bench_rollouts(*, concurrent: list[int], **options: Any) -> dict[str, float]:
    """Measure at several numbers of concurrent trajectories; each has a separate run and server.

    A round has two windows on the same server. One goes through asyncrl, with progress messages and versions of all
    tokens. In the other, a bare client sends whole requests and only counts their tokens. A window counts the tokens of
    trajectories that ended, plus the growth of the running requests' tokens between begin and end. All windows have the
    same lengths of generations. Later windows end after as many trajectories as the first, so that the server has the
    same work: its rate depends on the lengths. Every second round reverses the order.

    Args:
        concurrent: numbers of concurrent trajectories.
        seconds: length of the first window.
        rounds: number of rounds; figures are medians.
        options: the other fields of `Load` and `Served`.

    Returns:
        Medians of tokens/s, and of the rounds' ratios.

    Raises:
        BenchError: an actor failed, or no trajectory ended in time.
    """
    figures: dict[str, float] = {}
    server = Served(**{name: options.pop(name) for name in Served._fields})
    course = Course(**{name: options.pop(name) for name in Course._fields})
    if course.routing and SHAPES[server.shape].experts is None:
        named = ", ".join(name for name, shape in SHAPES.items() if shape.experts)
        raise BenchError(f"--routing: the shape {server.shape} has no experts; name one that has: {named}")
    for count in concurrent:
        found = await _measured(Load(concurrent=count, **options), server, course)
        figures |= {name.replace("_at", f"_{count}"): value for name, value in found.items()}
    return figures


async def _measured(load: Load, server: Served, course: Course) -> dict[str, float]:
    rates: dict[str, list[float]] = {name: [] for name in (["routed"] * course.routing + ["asyncrl", "bare"])}
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        config = _config(Path(scratch), load, server, course)
        async with Stage.open(config) as stage:
            await stage.enter_all(but=("prompter", "rollout"))
            await stage.enter("prompter")
            ready = decode(EngineReady, (await stage.follow(ENGINES, ENGINE_READY, lambda record: True)).data)
            key = read_key(stage.files.engine_key_file(config.engine, "engine-1"))
            client = EngineClient(ready.address, api_key=key)
            length = Window(course.seconds)
            for number in range(course.rounds):
                # so that slow changes of the machine affect both equally
                names = [*rates] if number % 2 == 0 else [*reversed(rates)]
                for name in names:
                    if name == "bare":
                        window = _bare(client, key or "", load, length)
                    else:
                        window = _with_workers(stage, client, load, length, routed=name == "routed")
                    rate, ends = await stage.until(window, _DEADLINE_S + course.seconds)
                    length = length._replace(ends=length.ends or ends)
                    rates[name].append(rate)
                    report(f"{load.concurrent}, round {number + 1}, {name}: {rates[name][-1]:,.0f} tokens/s")
                    await stage.until(client.empty(), _DEADLINE_S)
            await client.close()
    figures = {f"{name}_at_tokens_per_s": statistics.median(found) for name, found in rates.items()}
    figures["share_at_of_bare"] = _ratio(rates["asyncrl"], rates["bare"])
    if course.routing:
        figures["routed_at_of_unrouted"] = _ratio(rates["routed"], rates["asyncrl"])
    return figures


def _ratio(these: list[float], those: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


async def _with_workers(
    stage: Stage, client: EngineClient, load: Load, length: Window, *, routed: bool
) -> tuple[float, int]:
    """Measure a window through asyncrl; start the workers before it and stop them after it."""
    await stage.open_again(learner={"routing": "replay" if routed else "own"})
    for worker in range(load.workers):
        await stage.enter("rollout", worker + 1)
    found = await _through_asyncrl(stage, client, load, length, routed=routed)
    for worker in range(load.workers):
        await stage.leave("rollout", worker + 1)
    return found


def _config(scratch: Path, load: Load, server: Served, course: Course) -> Config:
    most = load.bounds[1]
    context = len(_PROMPT) + load.turns * most + 8
    model = scratch / "model"
    dtype = dtype_of(server.kind)
    server.write_model(model, context=context, dtype=dtype)
    module = scratch / "rollout.py"
    lengths = msgspec.json.encode([_lengths(load, worker) for worker in range(load.workers)]).decode()
    module.write_text(_MODULE.format(folder=str(scratch), tool_s=load.tool_s, workers=load.workers, lengths=lengths))
    switch = kind_of(server.kind).switches.get(Capability.EXPERTS) if course.routing else None
    returning = [switch] if switch else []
    return bench_config(
        "bench-rollouts",
        model={"path": str(model)},
        task={"source": "reverse", "options": {"letters": 6}, "rollout": f"{module}:rollout"},
        rollout={
            "workers": load.workers,
            "slots": load.slots,
            "group_size": _GROUP,
            "max_new_tokens": most,
        },
        buffer={"batch_groups": max(1, _BATCHES * load.concurrent // _GROUP), "max_lag": 0},
        learner={"steps": 1, "checkpoint_every": 1, "advantage": "none"},
        engine=server.table(load.concurrent, returning),
    )


async def _through_asyncrl(
    stage: Stage, client: EngineClient, load: Load, length: Window, *, routed: bool
) -> tuple[float, int]:
    """Return tokens/s of a window and its number of ended trajectories.

    The window begins once as many trajectories have ended as run at once.

    Raises:
        BenchError: experts were requested, and a trajectory has none.
    """
    await stage.follow(TRAJECTORIES, TRAJECTORY_GENERATED, _nth_since(time.time_ns(), load.concurrent))
    begin, before = time.time_ns(), await client.load()
    if length.ends:
        await stage.follow(TRAJECTORIES, TRAJECTORY_GENERATED, _nth_since(begin, length.ends))
    else:
        await asyncio.sleep(length.seconds)
    end, after = time.time_ns(), await client.load()
    results = [
        decode(TrajectoryGenerated, record.data)
        for record in await stage.read(TRAJECTORIES, [TRAJECTORY_GENERATED])
        if begin < record.time_ns <= end
    ]
    if routed and (without := [result.trajectory_id for result in results if result.routing is None]):
        raise BenchError(f"{len(without)} of {len(results)} trajectories have no experts, for example {without[0]}")
    tokens = sum(count.tokens for result in results for count in result.versions)
    return (tokens + after.tokens - before.tokens) / (end - begin) * 1e9, len(results)


def _nth_since(since_ns: int, count: int) -> Callable[[Record], bool]:
    """Return a function that is true for the record that completes `count` trajectories since a time."""
    later = itertools.count(1)
    return lambda record: record.time_ns > since_ns and next(later) >= count


async def _bare(client: EngineClient, key: str, load: Load, length: Window) -> tuple[float, int]:
    """Return tokens/s of the same window with a bare client, and its number of ended trajectories."""
    ends: list[tuple[float, int]] = []
    connector = aiohttp.TCPConnector(limit=load.concurrent)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(client.address, connector=connector, headers=headers) as session:
        lengths = [itertools.cycle(_lengths(load, worker)) for worker in range(load.workers)]
        clients = [
            asyncio.create_task(_trajectories(session, load, lengths[number % load.workers], ends))
            for number in range(load.concurrent)
        ]
        try:
            while len(ends) < load.concurrent:
                await sleep_unless_failed(clients, _LOOK_S)
            begin, before = time.monotonic(), await client.load()
            if not length.ends:
                await sleep_unless_failed(clients, length.seconds)
            while sum(at > begin for at, _ in ends) < length.ends:
                await sleep_unless_failed(clients, _LOOK_S)
            end, after = time.monotonic(), await client.load()
        finally:
            for task in clients:
                task.cancel()
            for task in clients:
                with suppress(asyncio.CancelledError):
                    await task
    ended = [tokens for at, tokens in ends if begin < at <= end]
    return (sum(ended) + after.tokens - before.tokens) / (end - begin), len(ended)


async def _trajectories(
    session: aiohttp.ClientSession, load: Load, lengths: Iterator[list[int]], ends: list[tuple[float, int]]
) -> None:
    for trajectory in lengths:
        tokens, sampled = list(_PROMPT), 0
        for turn, length in enumerate(trajectory):
            if turn:
                await asyncio.sleep(load.tool_s)
            body = {
                "input_ids": tokens,
                "sampling_params": {"max_new_tokens": length, "temperature": 1.0},
                "return_logprob": True,
            }
            async with session.post("/generate", data=msgspec.json.encode(body)) as response:
                if response.status != HTTPStatus.OK:
                    raise BenchError(f"the server answered {response.status}: {await response.text()}")
                answer = msgspec.json.decode(await response.read())
            tokens = tokens + answer["output_ids"]
            sampled += len(answer["output_ids"])
        ends.append((time.monotonic(), sampled))
