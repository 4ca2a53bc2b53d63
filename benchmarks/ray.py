"""The demo on simulated nodes of Ray: rate compared with child processes, a node that joins, nodes that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Collection
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp

from actors.prompter.data_order import DataOrder
from asyncrl.bus.log import LogReader, Record
from asyncrl.engine.control import read_key
from asyncrl.run.connect import FoundRun, opened
from asyncrl.run.directory import RunFiles
from asyncrl.state.audit.reading import audit_run
from benchmarks.chaos.report import violations_by_sense
from benchmarks.fleet import samples
from benchmarks.ray_nodes import Nodes, ray_nodes
from benchmarks.stage import BenchError, cpu_s, report, start_asyncrl
from topics.engines import ENGINE_READY, EngineReady
from topics.topic import ENGINES
from topics.wire import decode

PARTS = ("rate", "join", "kills")
_CPUS = 2  # of a node: the demo has three processes that Ray places
_NODES = 3
_POLL_S = 0.1
_STORE = 'weights.store="stream"'  # Ray requires it, and runs should differ only in their placement
_ENDLESS = "learner.steps=20000"
_JOINS = "engine-3"  # waits for the node that joins


async def bench_ray(*, parts: Collection[str], rounds: int, kills: int, limit_s: float) -> dict[str, float]:
    """Measure the given parts, one after the other; each has separate clusters and runs.

    Args:
        parts: names in `PARTS`.
        rounds: rounds of `rate` (two runs of the demo each) and of `join`.
        kills: number of nodes to kill.
        limit_s: limit of each wait: the end of a demo, a node that joined, all kills.

    Returns:
        RL trajectories/s by placement, with medians of their ratios by round; the reward of the last five steps (the
        minimum over the runs on Ray); and the cores that Ray used. Seconds from the start of a node until the head
        knows the node, and until its engine samples. The audit's findings after the kills.

    Raises:
        BenchError: a run failed, or something took longer than `limit_s`.
    """
    figures: dict[str, float] = {}
    if "rate" in parts:
        figures |= await _rates(rounds, limit_s)
    if "join" in parts:
        figures |= await _joins(rounds, limit_s)
    if "kills" in parts:
        figures |= await _kills(kills, limit_s)
    return figures


async def _rates(rounds: int, limit_s: float) -> dict[str, float]:
    rates: dict[str, list[float]] = {"local": [], "ray": []}
    rewards, cores = [], []
    for number in range(rounds):
        for kind in ("local", "ray") if number % 2 == 0 else ("ray", "local"):
            with tempfile.TemporaryDirectory(prefix="asyncrl-ray-", ignore_cleanup_errors=True) as scratch:
                folder = Path(scratch)
                if kind == "local":
                    await _asyncrl(folder, "up", "demo", *_set(_STORE), limit_s=limit_s)
                else:
                    with ray_nodes(*[_CPUS] * _NODES) as nodes:
                        began_s, cpu = time.monotonic(), _ray_cpu_s(nodes)
                        await _asyncrl(folder, "up", "demo", *_on(nodes, folder), limit_s=limit_s)
                        cores.append((_ray_cpu_s(nodes) - cpu) / (time.monotonic() - began_s))
                summary = json.loads((folder / "runs/demo/summary.json").read_text())
            rates[kind].append(summary["trajectories_trained"] / summary["rl_wall_s"])
            reward = summary["sampled_reward_last_5_steps"]
            rewards += [reward] if kind == "ray" else []
            load = os.getloadavg()[0]
            report(f"{kind}: {rates[kind][-1]:,.0f} trajectories/s, reward {reward:.3f}, load {load:.1f}")
    return {
        **{f"{kind}_trajectories_per_s": statistics.median(found) for kind, found in rates.items()},
        "ray_over_local": statistics.median(ray / local for local, ray in zip(*rates.values(), strict=True)),
        "ray_reward_last_5_steps": min(rewards),
        "ray_own_cores": statistics.median(cores),
    }


def _ray_cpu_s(nodes: Nodes) -> float:
    """Return the CPU seconds of Ray's processes so far; no other process runs on the cluster before and after a run."""
    return sum(map(cpu_s, nodes.found()))


async def _joins(rounds: int, limit_s: float) -> dict[str, float]:
    known, sampled = [], []
    with (
        ray_nodes(_CPUS, _CPUS) as nodes,
        tempfile.TemporaryDirectory(prefix="asyncrl-ray-", ignore_cleanup_errors=True) as scratch,
    ):
        folder = Path(scratch)
        async with _endless(folder, nodes, limit_s):
            await _asyncrl(folder, "scale", "demo", "engine=2", limit_s=limit_s)
            for _ in range(rounds):
                waits = await _asyncrl(folder, "scale", "demo", "engine=3", limit_s=limit_s, code=1)
                if "waits for a node" not in waits:
                    raise BenchError(f"{_JOINS} did not wait for a node: {waits.strip()}")
                began = time.time()
                node = nodes.add(_CPUS)
                await asyncio.to_thread(nodes.wait)
                known.append(time.time() - began)
                async with asyncio.timeout(limit_s):
                    await _first_token(RunFiles(folder / "runs/demo"), began)
                sampled.append(time.time() - began)
                report(f"node known after {known[-1]:.1f} s, samples after {sampled[-1]:.1f} s")
                await _asyncrl(folder, "scale", "demo", "engine=2", limit_s=limit_s)
                nodes.kill(node)
    return {
        "joined_node_known_s": statistics.median(known),
        "joined_node_samples_s": statistics.median(sampled),
        "joined_node_samples_max_s": max(sampled),
    }


async def _first_token(files: RunFiles, since: float) -> None:
    """Return once the engine on the joined node has sampled a token."""
    config = files.read_config()
    found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_ready(record: Record) -> None:
        if record.time_ns > since * 1e9 and not found.done():
            found.set_result(decode(EngineReady, record.data).address)

    async with opened(FoundRun(config.run, files.root), "bench") as bus:
        reader = LogReader(bus, ENGINES, on_ready, subjects=[ENGINE_READY.subject(config.run, _JOINS)])
        await reader.start()
        address = await found
        await reader.close()
    headers = {"Authorization": f"Bearer {read_key(files.own_engine_key)}"}
    async with aiohttp.ClientSession(address, headers=headers) as session:
        await samples(session)


async def _kills(kills: int, limit_s: float) -> dict[str, float]:
    with (
        ray_nodes(*[_CPUS] * _NODES) as nodes,
        tempfile.TemporaryDirectory(prefix="asyncrl-ray-", ignore_cleanup_errors=True) as scratch,
    ):
        folder = Path(scratch)
        async with _endless(folder, nodes, limit_s):
            words = ("--targets", "node", "--kills", str(kills), "--every", "4", "--seconds", str(limit_s))
            killing = asyncio.create_task(_asyncrl(folder, "chaos", "--run", "demo", *words, limit_s=2 * limit_s))
            try:
                while not killing.done():
                    if len(nodes.swept()) < _NODES:
                        nodes.add(_CPUS)
                    await asyncio.wait({killing}, timeout=_POLL_S)  # no event announces the death of a node
            finally:
                killing.cancel()
            said = killing.result()
            report(said)
            if f"node:kill {kills}\n" not in said:
                raise BenchError(f"fewer than {kills} nodes were killed within {limit_s:g} s")
            await _two_steps_more(folder, limit_s)
        return {"kills": float(kills), **await _audited(folder / "runs/demo")}


async def _audited(root: Path) -> dict[str, float]:
    async with opened(FoundRun(root.name, root), "bench") as bus:
        check = partial(DataOrder, base=RunFiles(root).base)
        findings = (await audit_run(bus, deep=True, check_rows=check)).findings
    lost, twice, others = violations_by_sense(findings)
    for line in (*lost, *twice, *others):
        report(line)
    found = {"lost": lost, "twice": twice, "other_violations": others}
    return {"trajectories": float(findings.issued), **{name: float(len(lines)) for name, lines in found.items()}}


@asynccontextmanager
async def _endless(folder: Path, nodes: Nodes, limit_s: float) -> AsyncIterator[None]:
    """Run the demo in the folder for the length of the block, from its second RL step; `asyncrl down` ends it."""
    settings = (*_on(nodes, folder), *_set(_ENDLESS, "eval.prompts=0"))
    running = asyncio.create_task(_asyncrl(folder, "up", "demo", *settings, limit_s=None))
    try:
        await _unless(running, _two_steps_more(folder, limit_s))
        yield
        await _asyncrl(folder, "down", "demo", limit_s=limit_s)
        async with asyncio.timeout(limit_s):
            await running
    finally:
        running.cancel()
        await asyncio.wait({running})


async def _unless(running: asyncio.Task[str], event: Awaitable[None]) -> None:
    """Wait for an event during a run.

    Raises:
        BenchError: the run ended first.
    """
    waiting = asyncio.ensure_future(event)
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise BenchError(f"the run ended too early: {running.result()}")
        waiting.result()
    finally:
        waiting.cancel()


async def _two_steps_more(folder: Path, limit_s: float) -> None:
    metrics = folder / "runs/demo/metrics.jsonl"

    def steps() -> int:
        return metrics.read_bytes().count(b'"stage":"rl"') if metrics.exists() else 0

    until = steps() + 2
    try:
        async with asyncio.timeout(limit_s):
            while steps() < until:  # noqa: ASYNC110 # a file announces nothing
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise BenchError(f"no two more steps of the run within {limit_s:g} s") from None


def _set(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def _on(nodes: Nodes, folder: Path) -> list[str]:
    """Return the settings of a run on a cluster."""
    placed = {"kind": "ray", "address": nodes.address, "folder": folder / "hosts"}
    return _set(_STORE, *(f'placement.{name}="{value}"' for name, value in placed.items()))


async def _asyncrl(folder: Path, *words: str, limit_s: float | None, code: int = 0) -> str:
    """Run `asyncrl WORDS` in a folder to its end; return its output. The process ends with this call.

    Raises:
        BenchError: another exit code than expected, or it took too long.
    """
    process = await start_asyncrl(folder, *words)
    said, command = "", f"asyncrl {' '.join(words[:2])}"
    try:
        async with asyncio.timeout(limit_s):
            said = (await process.communicate())[0].decode(errors="replace")
    except TimeoutError:
        raise BenchError(f"{command} did not end within {limit_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != code:
        raise BenchError(f"{command} ended with code {process.returncode}: {said[-2000:].strip()}")
    return said
