"""The cost of sinks: CPU time per trained trajectory with and without them, and a scrape of Prometheus."""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from actors.recorder.sinks import named
from asyncrl.bus.log import Record
from asyncrl.bus.publish import decode_body
from asyncrl.config.settings import Config, RolloutSettings
from asyncrl.ports import free_port
from asyncrl.sinks.kinds import KINDS
from asyncrl.training.init_model import create_configured
from benchmarks.cost import cost_config, cpu_us_per_trajectory
from benchmarks.stage import Stage, report
from topics.actors import VITALS_TAKEN, Vitals
from topics.batches import BATCH_TRAINED
from topics.topic import TRAINING, VITALS

_TOKENS = 4096  # of an answer; 256 slots sample them, each in about 8 s
_DEADLINE_S = 120.0
_T_975 = {
    1: 12.71,
    2: 4.30,
    3: 3.18,
    4: 2.78,
    5: 2.57,
    6: 2.45,
    7: 2.36,
    8: 2.31,
    9: 2.26,
    10: 2.23,
    11: 2.20,
    14: 2.14,
}
_SCRAPES = 20


def installed_sinks(folder: Path, collector: str, kinds: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a table of each kind of sinks whose package is installed, or of those of the given kinds."""
    own: dict[str, dict[str, Any]] = {
        "file": {"directory": str(folder)},
        "prometheus": {"port": free_port()},
        "otlp": {"endpoint": collector},
    }
    installed = [name for name, kind in KINDS.items() if not kind().problem() and (not kinds or name in kinds)]
    return [{"kind": name, **own.get(name, {})} for name in installed]


def sinks_config(model: Path, sinks: list[dict[str, Any]]) -> Config:
    """Return an endless run with some sinks."""
    config = cost_config(model, RolloutSettings(max_new_tokens=_TOKENS).progress_limit, _TOKENS)
    return msgspec.convert(msgspec.to_builtins(config) | {"run": "bench-sinks", "metrics": sinks}, Config)


async def bench_sinks(*, pairs: int, seconds: float, kinds: Sequence[str] = ()) -> dict[str, float]:
    """Measure pairs of runs side by side, one with all installed sinks and one without, and then a scrape.

    Both runs of a pair share the machine, whose speed changes by more than the measured difference. The window begins
    once each sink has stored a row: a run opens its sinks once, which takes seconds of CPU time for imports.

    Args:
        pairs: number of runs of each kind.
        seconds: length of each measured window.
        kinds: of sinks; empty: all installed ones.

    Returns:
        Medians of CPU microseconds per trained trajectory over all processes and the server; the mean of the pairs'
        ratios less 1, with the upper end of its 95 % interval; bytes and seconds of a scrape.

    Raises:
        BenchError: a run did not reach its window.
    """
    costs: list[tuple[float, float]] = []
    scrapes: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        create_configured(model, msgspec.convert({"model": {"create": {"context": 2 * _TOKENS}}}, Config))
        async with _collector() as address:
            for pair in range(pairs):
                sinks = installed_sinks(Path(scratch) / str(pair), address, kinds)
                configs = [sinks_config(model, sinks), sinks_config(model, [])]
                on, off = await asyncio.gather(*(_cpu_us(config, seconds, scrapes) for config in configs))
                costs.append((on, off))
                report(f"pair {pair + 1}: {on:,.0f} and {off:,.0f} CPU microseconds per trajectory")
    ratios = [on / off - 1 for on, off in costs]
    mean, half = statistics.fmean(ratios), _half_interval(ratios)
    return {
        "pairs": float(pairs),
        "sinks": float(len(sinks)),
        "with_sinks_cpu_us_per_trajectory": statistics.median(on for on, _ in costs),
        "without_sinks_cpu_us_per_trajectory": statistics.median(off for _, off in costs),
        "sinks_cost_share": mean,
        "sinks_cost_share_upper": mean + half,
    } | (
        {
            "scrape_bytes": float(max(size for size, _ in scrapes)),
            "scrape_s": statistics.median(took for _, took in scrapes),
        }
        if scrapes
        else {}
    )


def _half_interval(values: list[float]) -> float:
    """Half of the 95 % interval of the mean; source: Student's t distribution."""
    if len(values) < 2:
        return math.inf
    freedom = len(values) - 1
    t = next((t for least, t in sorted(_T_975.items(), reverse=True) if least <= freedom), math.inf)
    return t * statistics.stdev(values) / math.sqrt(len(values))


async def _cpu_us(config: Config, seconds: float, scrapes: list[tuple[int, float]]) -> float:
    async with Stage.open(config) as stage:
        await stage.enter_all()
        await stage.enter("prompter")
        names = [f"{name}_sink_rows" for name, sink in named(config.metrics) if not sink.traces]
        has_rows = stage.follow(VITALS, VITALS_TAKEN, lambda record: _has_rows(record, names) or not names)
        await stage.until(has_rows, _DEADLINE_S)
        cpu_us = await stage.until(cpu_us_per_trajectory(stage, seconds), _DEADLINE_S + seconds)
        await stage.follow(TRAINING, BATCH_TRAINED, lambda record: True)
        for port in [sink.port for sink in config.metrics if hasattr(sink, "port")]:
            scrapes += [await _scrape(port) for _ in range(_SCRAPES)]
    return cpu_us


def _has_rows(record: Record, names: list[str]) -> bool:
    """Return whether the recorder reports rows of all these sinks."""
    vitals: Vitals = decode_body(VITALS_TAKEN, record.data)
    return vitals.role == "recorder" and all(vitals.values.get(name) for name in names)


async def _scrape(port: int) -> tuple[int, float]:
    """Return bytes and seconds of a scrape, once the sink serves."""
    async with asyncio.timeout(_DEADLINE_S):
        while True:
            try:
                return await asyncio.to_thread(_get, port)
            except OSError:
                await asyncio.sleep(0.1)  # nothing announces that a sink has opened


def _get(port: int) -> tuple[int, float]:
    began = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return len(answer.read()), time.perf_counter() - began


@asynccontextmanager
async def _collector() -> AsyncIterator[str]:
    """Answer all requests for traces."""
    app = web.Application()
    app.router.add_post("/v1/traces", _take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _take(http: web.Request) -> web.Response:
    await http.read()
    return web.Response(content_type="application/x-protobuf")
