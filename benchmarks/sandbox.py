"""Sandboxes: starts per second, the time of a program, and the memory of a waiting one."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator

import psutil

from asyncrl.config.sandbox_settings import SandboxSettings, sandbox_kind
from asyncrl.sandboxes.served import ServedSandbox
from benchmarks.stage import BenchError

_WARM = 5  # starts and programs that are not counted
_TRUE = ["/bin/true"]


async def bench_sandbox(*, kind: str, starts: int, running: int, programs: int) -> dict[str, float]:
    """Time of starts and of programs.

    Args:
        kind: of the sandboxes.
        starts: sandboxes that are started, each with one program, and destroyed.
        running: sandboxes that start at once.
        programs: that run one after the other in one sandbox.

    Returns:
        Figures by name, units in the names.

    Raises:
        BenchError: sandboxes of this kind cannot start here.
    """
    settings = SandboxSettings(kind=kind, trusted=True)  # type: ignore[arg-type] # the parser knows the kinds
    if problem := sandbox_kind(kind).problem(settings):
        raise BenchError(problem)
    await _one(settings)
    cpu_s = _cpu_s()
    rate = await _rate(settings, starts, running)
    cpu_s = _cpu_s() - cpu_s
    sandbox = ServedSandbox(settings)
    await sandbox.start()
    try:
        times = [await _timed(sandbox) for _ in range(programs + _WARM)][_WARM:]
        large = b"1" * 1_000_000
        began = time.perf_counter()
        await sandbox.put("file", large)
        await sandbox.get("file", most_bytes=len(large))
        both_s = time.perf_counter() - began
        memory = sum(process.memory_full_info().uss for process in _processes(sandbox)) / 1e6
    finally:
        await sandbox.destroy()
    return {
        "starts_per_s": rate,
        "cpu_of_a_start_ms": 1e3 * cpu_s / starts,
        "exec_median_ms": 1e3 * statistics.median(times),
        "exec_p95_ms": 1e3 * statistics.quantiles(times, n=20)[-1],
        "put_and_get_of_1_mb_ms": 1e3 * both_s,
        "memory_of_a_waiting_sandbox_mb": memory,
    }


async def _rate(settings: SandboxSettings, starts: int, running: int) -> float:
    """Start, use and destroy sandboxes; returns how many a second."""
    left = iter(range(starts))

    async def some() -> None:
        for _ in left:
            await _one(settings)

    began = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(running)))
    return starts / (time.perf_counter() - began)


def _cpu_s() -> float:
    """CPU time of this process and of all that it has waited for."""
    return sum(os.times()[:4])


async def _one(settings: SandboxSettings) -> None:
    sandbox = ServedSandbox(settings)
    await sandbox.start()
    try:
        await _timed(sandbox)
    finally:
        await sandbox.destroy()


async def _timed(sandbox: ServedSandbox) -> float:
    """Run a program; returns its seconds."""
    began = time.perf_counter()
    result = await sandbox.exec(_TRUE, on_output=_ignored)
    if result.code:
        raise BenchError(f"{_TRUE[0]} ended with {result}")
    return time.perf_counter() - began


def _ignored(_stream: object, _piece: bytes) -> None:
    """Take output that does not count."""


def _processes(sandbox: ServedSandbox) -> Iterator[psutil.Process]:
    first = psutil.Process(sandbox.process)
    yield from (first, *first.children(recursive=True))
