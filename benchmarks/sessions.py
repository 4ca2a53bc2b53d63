"""Many concurrent sessions through the gateway during weight updates, compared with direct requests of the same ids.

The trainer, gateways, the engine and its server are real. Each window has separate client processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
import msgspec

from benchmarks.random_model import SHAPES
from benchmarks.session_clients import Crowd
from benchmarks.stage import BenchError, report
from benchmarks.talks import CONTEXT, Reply, gateway_key, percentile
from benchmarks.updates import STREAM_TOKENS, Served, Updates

_DEADLINE_S = 900.0
_AFTER_S = 1.0  # time after `engine.ready` in which a silence still counts for the update


class Traffic(NamedTuple):
    """The sessions and the versions of a window."""

    sessions: int  # number of concurrent sessions
    gateways: int  # processes
    clients: int  # processes that share the sessions
    tokens: int  # of a reply
    versions: int
    every_s: float  # seconds from one step to the next; longer if a version takes longer
    still: bool  # no steps: all versions have the weights of the first


Times = list[tuple[float, float]]  # begin and end, of the monotonic clock


async def bench_sessions(*, way: str, updates: list[str], **options: Any) -> dict[str, float]:
    """Measure a window through the gateway and one directly to the engine, for each kind of update.

    Both windows have the same number of versions. The trainer makes a step before each version, unless it is still.
    Sessions of three turns have no pauses. All replies are streamed, with the same number of tokens per event in both
    windows. A direct session sends the ids of its messages after those of the earlier turns.

    Args:
        way: way of the versions, see `Served`.
        updates: kinds of `weights.update`.
        options: the fields of `Traffic`, and the other fields of `Served`.

    Returns:
        Names begin with the kind of update. Tokens/s of both windows and their ratio, and failed requests. Milliseconds
        to the first text, from the last text to the end of the reply, and the longest times between two events of a
        stream, of both windows. Also medians of the engine's pauses. The longest times are given separately for times
        that touch an update (from `engine.updating` to 1 s after `engine.ready`), that touch a step of the trainer, and
        all others.

    Raises:
        BenchError: an actor or a client failed.
    """
    traffic = Traffic(**{name: options.pop(name) for name in Traffic._fields})
    figures: dict[str, float] = {}
    for update in updates:
        served = Served(way, update, running=traffic.sessions, context=CONTEXT, gateways=traffic.gateways, **options)
        async with Updates.opened(served) as run:
            found = await _measured(run, served, traffic)
        figures |= {f"{update}_{name}": value for name, value in found.items()}
    return figures


async def _measured(run: Updates, served: Served, traffic: Traffic) -> dict[str, float]:
    stage, address = run.stage, f"http://127.0.0.1:{run.stage.config.gateway.port}"
    for number in range(1, traffic.gateways + 1):
        await stage.enter("gateway", number)
    await stage.enter("sessions")
    async with aiohttp.ClientSession() as http:
        key = await stage.until(gateway_key(stage, http, address), _DEADLINE_S)
    crowd = Crowd(
        bus=str(stage.files.credentials / "rollout.json"),
        run=stage.config.run,
        engine_key=str(stage.files.engine_key_file(stage.config.engine, "engine-1")),
        gateway=address,
        key=key,
        tokens=traffic.tokens,
        portion=STREAM_TOKENS,
        in_place=served.update == "in_place",
        vocabulary=SHAPES[served.shape].vocabulary,
        sessions=-(-traffic.sessions // traffic.clients),
    )
    found: dict[str, float] = {}
    for name, straight in (("gateway", False), ("straight", True)):
        made = await _window(run, msgspec.structs.replace(crowd, straight=straight), traffic)
        report(f"{served.update}, {name}: {made}")
        found |= {f"{name}_{figure}": value for figure, value in made.items()}
    return found | {"share_of_straight": found["gateway_tokens_per_s"] / found["straight_tokens_per_s"]}


async def _window(run: Updates, crowd: Crowd, traffic: Traffic) -> dict[str, float]:
    stage, pauses, updates, steps = run.stage, list[float](), Times(), Times()
    async with contextlib.AsyncExitStack() as stack:
        processes = []
        for number in range(traffic.clients):
            part = msgspec.structs.replace(crowd, first=number * crowd.sessions)
            processes.append(await stack.enter_async_context(_client(part)))
        for process in processes:
            await stage.until(_begun(process), _DEADLINE_S)
        cpu_s, began = stage.cpu_s(), time.monotonic()
        for number in range(len(run.versions), len(run.versions) + traffic.versions):
            stepped = time.monotonic()
            due = stepped + traffic.every_s
            if not traffic.still:
                await run.step()
            await run.copy()
            steps.append((stepped, time.monotonic()))
            version = await run.announce(number)
            pauses.append((await run.loaded(version)).pause_s)
            updates.append((run.updating[version.key], run.ready[version.key][1] + _AFTER_S))
            await run.prune(version)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        ended, used = time.monotonic(), stage.cpu_s()
        replies = [reply for process in processes for reply in await stage.until(_replies(process), _DEADLINE_S)]
    cores = sum(used[name] - cpu_s[name] for name in used if name.startswith("gateway")) / (ended - began)
    counts = {"updates": float(traffic.versions), "pause_p50_s": statistics.median(pauses), "gateway_cores": cores}
    asked = [one for one in replies if began <= one.asked_s < ended]
    return summed(replies, began, ended) | silences(asked, updates, steps) | counts


@contextlib.asynccontextmanager
async def _client(crowd: Crowd) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a client process; the end of its stdin ends it."""
    pipe, words = asyncio.subprocess.PIPE, ["-m", "benchmarks.session_clients", msgspec.json.encode(crowd).decode()]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _begun(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    if not await process.stdout.readline():
        raise BenchError(f"clients ended with code {await process.wait()}")


async def _replies(process: asyncio.subprocess.Process) -> list[Reply]:
    output, _ = await process.communicate(b"")
    if process.returncode:
        raise BenchError(f"clients ended with code {process.returncode}")
    return msgspec.msgpack.decode(output, type=list[Reply])


def summed(replies: list[Reply], began: float, ended: float) -> dict[str, float]:
    """Return the window's tokens, and the figures of requests that began in it."""
    tokens = sum(count for one in replies for at, count in one.came if began <= at < ended)
    asked = [one for one in replies if began <= one.asked_s < ended]
    whole = [one for one in asked if not one.failed]
    first_ms = [1e3 * one.first_s for one in whole]
    end_ms = [1e3 * (one.asked_s + one.whole_s - one.came[-1][0]) for one in whole if one.came]
    return {
        "tokens_per_s": tokens / (ended - began),
        "requests": float(len(asked)),
        "failed": float(sum(one.failed for one in asked)),
        "first_token_p50_ms": percentile(first_ms, 0.5),
        "first_token_p99_ms": percentile(first_ms, 0.99),
        "last_to_end_p50_ms": percentile(end_ms, 0.5),
        "last_to_end_p99_ms": percentile(end_ms, 0.99),
        "longest_silence_s": max((one.silence_s for one in whole), default=float("nan")),
    }


def silences(replies: list[Reply], updates: Times, steps: Times) -> dict[str, float]:
    """Return the longest times between two texts of a reply: during an update, else during a step, else the rest."""
    pairs = (pair for one in replies if not one.failed for pair in itertools.pairwise(one.came))
    found = {"silence_at_update_s": 0.0, "silence_at_step_s": 0.0, "silence_besides_s": 0.0}
    for (began, _), (ended, _) in pairs:
        if ended - began > min(found.values()):  # only the few longest need a closer check
            touched = (any(first < ended and began < last for first, last in times) for times in (updates, steps))
            name = next((name for name, touches in zip(found, touched, strict=False) if touches), "silence_besides_s")
            found[name] = max(found[name], ended - began)
    return found
