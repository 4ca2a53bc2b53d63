"""Latencies of a gateway's clients while its model learns: the same seeded load with and without training."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from asyncrl.bus.log import Record
from asyncrl.bus.publish import read
from asyncrl.config.settings import Config
from benchmarks.stage import BenchError, Stage, bench_config, report
from benchmarks.talks import APIS, Reply, Talk, gateway_key, percentile, talking_model
from topics.batches import BATCH_TRAINED
from topics.engines import ENGINE_READY, EngineReady
from topics.topic import ENGINES, TRAINING, Stream, Topic

_TURNS, _TOKENS = 3, 128  # turns of a session, tokens of a reply
_PAUSE_S = 0.5  # of a user, before the next message
_WARM_S = 10.0  # of load, before a window begins
_WORDS = "abcdefghijklmnopqrstuvwxyz "
_ASKED = 40  # characters of a message
_BATCH = 48  # turns of an optimiser step
_NEVER = 1_000_000
_DEADLINE_S = 900.0
_WORST = ("not_2xx", "broken_streams", "longest_silence_ms")  # figures of which the maximum of all rounds counts
KINDS: dict[str, dict[str, Any]] = {
    "still": {"share": 0.0, "publish_every": 1},  # nothing is trained
    "shared": {"share": 1.0, "publish_every": _NEVER},  # the learner trains on the same cores, and publishes no version
    "trained": {"share": 1.0, "publish_every": 1},  # the engine also loads each version
}


async def bench_live(
    *,
    rate: float,
    seconds: float,
    kinds: list[str],
    rounds: int = 1,
    update: str = "resume",
    **gateway: Any,
) -> dict[str, float]:
    """Measure runs under the same load, one after the other.

    Sessions of three turns begin at a fixed rate and alternate between the three APIs; all replies are streamed. A seed
    draws the users' messages, each of which grades the reply before it.

    Args:
        rate: requests per second.
        seconds: length of a window, after a warm-up.
        kinds: names in `KINDS`.
        rounds: runs of each kind, interleaved: a p99 of one window differs by a tenth from the next one.
        update: `weights.update`.
        gateway: its settings.

    Returns:
        For each kind: requests, failed requests, and milliseconds; latencies are medians of the rounds, failures
        maxima. With all kinds, also the cost of sharing cores with a learner, and the additional cost of updates.

    Raises:
        BenchError: an actor failed, or `rounds` is 0.
    """
    if rounds < 1:
        raise BenchError(f"--rounds {rounds}: expected 1 or more")
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        model = talking_model(Path(scratch) / "model")
        for number in range(rounds):
            figures: dict[str, float] = {}
            for kind in kinds:
                config = _config(model, gateway, {"update": update}, **KINDS[kind])
                window = await _measured(config, rate, seconds)
                figures |= {f"{kind}_{name}": value for name, value in window.items()}
                report(f"{kind}, round {number + 1}: {window}")
            found.append(figures | _costs(figures))
    return together(found)


def together(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the figures of several rounds: medians, and the maxima of failures and silences."""
    values: dict[str, list[float]] = {}
    for name in {name: None for figures in rounds for name in figures}:
        values[name] = [figures[name] for figures in rounds if name in figures]
        if name.endswith(("_cores", "_waited")):  # very small values are left out
            values[name] += [0.0] * (len(rounds) - len(values[name]))
    return {name: max(each) if name.endswith(_WORST) else statistics.median(each) for name, each in values.items()}


def _costs(figures: dict[str, float]) -> dict[str, float]:
    """Return the ratios of the measured kinds."""
    found: dict[str, float] = {}
    kinds = [kind for kind in KINDS if f"{kind}_updates" in figures]
    for name in ("first_token_p50_ms", "first_token_p99_ms", "whole_p99_ms", "longest_silence_ms"):
        if kinds == list(KINDS):
            still, shared, trained = (figures[f"{kind}_{name}"] for kind in KINDS)
            found[f"shared_cores_cost_{name}"] = shared - still
            found[f"updates_cost_{name}"] = trained - shared
    for name in ("first_token", "whole"):
        if {"still", "trained"} <= set(kinds):
            found[f"{name}_p99_over_still"] = figures[f"trained_{name}_p99_ms"] / figures[f"still_{name}_p99_ms"]
    return found


def _config(model: Path, gateway: dict[str, Any], weights: dict[str, Any], share: float, publish_every: int) -> Config:
    return bench_config(
        "bench-live",
        model={"path": str(model)},
        gateway={"count": 1, "port": 0, **gateway},
        weights=weights,
        live={"fraction": share, "judge": {"kind": "rule"}},
        buffer={"batch_groups": _BATCH, "max_lag": _NEVER - 1},
        rollout={"max_new_tokens": _TOKENS},
        learner={
            "trainer": "torch",
            "steps": _NEVER,
            "lr": 1e-6,  # the replies of all three runs must stay similar
            "publish_every": publish_every,
            "checkpoint_every": _NEVER,
        },
        engine={"kind": "embedded"},
    )


async def _measured(config: Config, rate: float, seconds: float) -> dict[str, float]:
    async with Stage.open(config) as stage, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        address = f"http://127.0.0.1:{stage.config.gateway.port}"
        await stage.enter_all()
        if config.live.fraction:
            await stage.enter("prompter")
        key = await gateway_key(stage, http, address)
        begin = time.monotonic() + _WARM_S
        clock_ns = time.time_ns() + int(_WARM_S * 1e9)
        async with _cpu(stage) as used:
            load = _load(http, address, key, rate, _WARM_S + seconds)
            replies = await stage.until(load, _DEADLINE_S + seconds)
        window = [one for one in replies if begin <= one.asked_s < begin + seconds]
        ready = await _within(stage, ENGINES, ENGINE_READY, clock_ns, seconds)
        pauses = [(await read(stage.bus, EngineReady, record)).pause_s for record in ready]
        counts = {
            "updates": float(len(ready)),
            "steps": float(len(await _within(stage, TRAINING, BATCH_TRAINED, clock_ns, seconds))),
        }
        if pauses:
            counts["pause_p50_ms"] = 1e3 * percentile(pauses, 0.5)
        return {**summed(window, seconds), **counts, **used}


def summed(replies: list[Reply], seconds: float) -> dict[str, float]:
    """Return the clients' figures of a window."""
    whole = [one for one in replies if not one.failed]
    first_ms, whole_ms = [1e3 * one.first_s for one in whole], [1e3 * one.whole_s for one in whole]
    return {
        "requests_per_s": len(replies) / seconds,
        "not_2xx": float(sum(one.status // 100 != 2 for one in replies)),
        "broken_streams": float(sum(one.broken and one.status // 100 == 2 for one in replies)),
        "first_token_p50_ms": percentile(first_ms, 0.5),
        "first_token_p99_ms": percentile(first_ms, 0.99),
        "whole_p50_ms": percentile(whole_ms, 0.5),
        "whole_p99_ms": percentile(whole_ms, 0.99),
        "longest_silence_ms": 1e3 * max((one.silence_s for one in whole), default=0.0),
        "characters_per_reply": sum(len(one.text) for one in whole) / max(1, len(whole)),
    }


async def _load(http: aiohttp.ClientSession, address: str, key: str, rate: float, seconds: float) -> list[Reply]:
    """Begin sessions at their times, and return all replies."""
    began, replies = time.monotonic(), list[Reply]()

    async def session(number: int) -> None:
        await asyncio.sleep(began + number * _TURNS / rate - time.monotonic())
        draw = random.Random(f"session {number}")
        talk = Talk(http, address, key, APIS[number % len(APIS)])
        for turn in range(_TURNS):
            opinion = draw.choice(("good ", "wrong ")) if turn else ""
            replies.append(await talk.send(opinion + "".join(draw.choices(_WORDS, k=_ASKED)), tokens=_TOKENS))
            await asyncio.sleep(_PAUSE_S)

    await asyncio.gather(*(session(number) for number in range(int(seconds * rate / _TURNS))))
    return replies


@asynccontextmanager
async def _cpu(stage: Stage) -> AsyncIterator[dict[str, float]]:
    """Yield the cores that each process used during the block and waited for; values below a hundredth are left out."""
    used: dict[str, float] = {}
    began, cpu_s, waited_s = time.monotonic(), stage.cpu_s(), stage.waited_s()
    yield used
    span = time.monotonic() - began
    for what, now, before in (("cores", stage.cpu_s(), cpu_s), ("waited", stage.waited_s(), waited_s)):
        shares = {name: (spent - before.get(name, 0.0)) / span for name, spent in now.items()}
        used |= {f"{name}_{what}": share for name, share in sorted(shares.items()) if share >= 0.01}


async def _within(stage: Stage, stream: Stream, topic: Topic[Any], begin_ns: int, seconds: float) -> list[Record]:
    records = await stage.read(stream, [topic])
    return [record for record in records if begin_ns <= record.time_ns < begin_ns + seconds * 1e9]
