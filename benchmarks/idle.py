"""The cost of an idle run: all actors under a supervisor, and engines that never answer."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import psutil

from asyncrl.bus.log import LogReader
from asyncrl.config.load import LoadedConfig
from asyncrl.config.settings import Config
from asyncrl.run.launch import Launch
from benchmarks.stage import BenchError, bench_config, cpu_s
from topics.prompts import PROMPT_ISSUED
from topics.topic import PROMPTS

_GROUPS, _LAG = 32, 1
_DEADLINE_S = 120.0
_SETTLED_S = 5.0  # for processes to finish their start


def idle_config(directory: Path) -> Config:
    """Return a run whose slots are all taken by generations that last weeks."""
    return bench_config(
        "bench-idle",
        directory=str(directory),
        rollout={"slots": 256, "group_size": 8},
        buffer={"batch_groups": _GROUPS, "max_lag": _LAG},
        learner={"steps": 100},
        engine={"kind": "scripted", "scripted_mean_s": 1e6, "scripted_sigma": 0.0},
    )


async def bench_idle(*, seconds: float) -> dict[str, float]:
    """CPU time of all processes of a waiting run, with the NATS server and the supervisor.

    Args:
        seconds: length of the measured window.

    Returns:
        Per cent of one core, in all and per process.

    Raises:
        BenchError: the run did not start.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True) as directory:
        before = {child.pid for child in psutil.Process().children()}
        launch = Launch(LoadedConfig(idle_config(Path(directory)), Path(directory), Path()))
        launch.prepare()
        try:
            await _issued(launch)
            await asyncio.sleep(_SETTLED_S)
            processes = _processes(before)
            began = time.monotonic()
            first = {name: cpu_s(process) for name, process in processes.items()}
            await asyncio.sleep(seconds)
            span = time.monotonic() - began
            shares = {name: 100 * (cpu_s(process) - first[name]) / span for name, process in processes.items()}
        finally:
            await launch.stop()
    figures = {"idle_cpu_percent_of_a_core": sum(shares.values())}
    return figures | {f"{name}_cpu_percent_of_a_core": share for name, share in sorted(shares.items())}


async def _issued(launch: Launch) -> None:
    """Start the run and return once all its prompts are issued."""
    bus = await launch.start()
    wanted, seen, all_issued = _GROUPS * (_LAG + 1) * launch.config.rollout.group_size, 0, asyncio.Event()

    def count(_record: object) -> None:
        nonlocal seen
        seen += 1
        if seen >= wanted:
            all_issued.set()

    reader = LogReader(bus, PROMPTS, count, subjects=[PROMPT_ISSUED.pattern(bus.run)], headers_only=True)
    await reader.start()
    try:
        async with asyncio.timeout(_DEADLINE_S):
            await all_issued.wait()
    except TimeoutError:
        raise BenchError(f"run {bus.run}: {seen} of {wanted} prompts issued within {_DEADLINE_S:.0f} s") from None
    await reader.close()
    await bus.close()


def _processes(others: set[int]) -> dict[str, psutil.Process]:
    """Return the run's processes by the name of the actor."""
    found: dict[str, psutil.Process] = {}
    for top in psutil.Process().children():
        if top.pid in others:
            continue
        for process in [top, *top.children()]:
            words = process.cmdline()
            found[words[words.index("actors.main") + 2] if "actors.main" in words else process.name()] = process
    return found
