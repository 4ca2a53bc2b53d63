"""Throughput of a run whose engines join and leave, and the time until a joined engine samples."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp

from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from asyncrl.engine.control import read_key
from asyncrl.training.init_model import create_configured
from benchmarks.pipeline import endless_config
from benchmarks.stage import Stage, report
from topics.batches import BATCH_PACKED
from topics.engines import ENGINE_READY, EngineReady
from topics.prompts import PROMPT_ISSUED
from topics.topic import BATCHES, ENGINES, PROMPTS, TRAJECTORIES
from topics.trajectories import TRAJECTORY_FAILED, TRAJECTORY_GENERATED, TrajectoryGenerated
from topics.wire import decode

_SLOTS, _MEAN_S, _TOKENS = 16, 0.5, 512  # of a scripted engine
_MOST = 4
_POLL_S = 0.01
_DEADLINE_S = 120.0


async def bench_fleet(*, seconds: float) -> dict[str, float]:
    """Measure one scripted engine of a fixed rate, then four, then one again; then add an embedded engine.

    Args:
        seconds: length of each window, which begins two batches after the change.

    Returns:
        Tokens/s, and their share of the engines' greatest rate. Number of trajectories that failed or have two results;
        the benchmark waits until all have one. Seconds from the start of an embedded engine to its server, and from
        there to its first token.

    Raises:
        BenchError: an actor failed, or no batch was packed in time.
    """
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        create_configured(model, Config())
        scripted = {"kind": "scripted", "scripted_mean_s": _MEAN_S, "scripted_sigma": 0.0, "max_running": _SLOTS}
        config = endless_config("bench-fleet", model, tokens=_TOKENS, progress_tokens=64, **scripted)
        async with Stage.open(config) as stage:
            figures = await _scaled(stage, seconds)
        config = endless_config("bench-fleet", model, tokens=16, progress_tokens=16, kind="embedded")
        async with Stage.open(config) as stage:
            return figures | await _joined(stage)


async def _scaled(stage: Stage, seconds: float) -> dict[str, float]:
    await stage.enter_all()
    await stage.enter("prompter")
    rates = {"one": await _rate(stage, seconds)}
    for number in range(2, _MOST + 1):
        await stage.enter("engine", number)
    rates["four"] = await _rate(stage, seconds)
    for number in range(_MOST, 1, -1):
        await stage.leave("engine", number)
    rates["one_again"] = await _rate(stage, seconds)
    await stage.leave("prompter")
    results = await stage.until(_all_results(stage), _DEADLINE_S)
    best = _SLOTS * _TOKENS / _MEAN_S
    figures = {}
    for name, rate in rates.items():
        figures[f"{name}_tokens_per_s"] = rate
        figures[f"{name}_share_of_most"] = rate / best / (_MOST if name == "four" else 1)
    failed = await stage.read(TRAJECTORIES, [TRAJECTORY_FAILED])
    doubled = sum(count - 1 for count in Counter(results).values())
    return figures | {"trajectories": float(len(results)), "failed": float(len(failed)), "doubled": float(doubled)}


async def _rate(stage: Stage, seconds: float) -> float:
    """Return tokens/s of results, from the second batch after the call."""
    since = time.time_ns()
    seen: list[int] = []

    def second(record: Record) -> bool:
        seen.append(record.time_ns)
        return sum(at > since for at in seen) == 2

    begin = (await stage.until(stage.follow(BATCHES, BATCH_PACKED, second), _DEADLINE_S)).time_ns
    end = begin + int(seconds * 1e9)
    later = stage.follow(TRAJECTORIES, TRAJECTORY_GENERATED, lambda record: record.time_ns > end)
    await stage.until(later, _DEADLINE_S + seconds)
    records = await stage.read(TRAJECTORIES, [TRAJECTORY_GENERATED])
    results = [decode(TrajectoryGenerated, record.data) for record in records if begin < record.time_ns <= end]
    rate = sum(count.tokens for result in results for count in result.versions) / seconds
    report(f"{rate:,.0f} tokens/s")
    return rate


async def _all_results(stage: Stage) -> list[str]:
    """Return the ids of trajectories with a result, once all issued trajectories have one."""
    issued = len(await stage.read(PROMPTS, [PROMPT_ISSUED]))
    while True:
        records = await stage.read(TRAJECTORIES, [TRAJECTORY_GENERATED])
        results = [decode(TrajectoryGenerated, record.data).trajectory_id for record in records]
        if len({*results}) >= issued:
            return results
        await asyncio.sleep(1.0)


async def _joined(stage: Stage) -> dict[str, float]:
    await stage.enter_all()
    await stage.enter("prompter")
    await stage.until(stage.follow(BATCHES, BATCH_PACKED, lambda record: True), _DEADLINE_S)
    began = time.time()
    await stage.enter("engine", 2)
    record = await stage.until(
        stage.follow(ENGINES, ENGINE_READY, lambda record: record.subject.endswith(".engine-2")), _DEADLINE_S
    )
    address = decode(EngineReady, record.data).address
    key = read_key(stage.files.engine_key_file(stage.config.engine, "engine-2"))
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(address, headers=headers) as session:
        async with session.get("/server_info") as response:
            up = float((await response.json())["startup_time"])
        await stage.until(samples(session), _DEADLINE_S)
    sampled = time.time()
    return {"joined_process_up_s": up - began, "joined_first_token_after_up_s": sampled - up}


async def samples(session: aiohttp.ClientSession) -> None:
    """Return once a server's counter shows a sampled token."""
    while True:
        async with session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        if any(line.startswith("sglang:generation_tokens_total{") and float(line.split()[-1]) > 0 for line in lines):
            return
        await asyncio.sleep(_POLL_S)
