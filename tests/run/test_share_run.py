"""Two whole runs that share engines and rollout workers 70 to 30 by `asyncrl share`; it is killed, then one of them."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asyncrl.bus.merged_reader import Part, read_merged
from asyncrl.process import python
from benchmarks.ray_nodes import ray_nodes
from harness.audited import audited_clean, topics_left_by
from harness.runs import LIMIT_S, UNTRAINED, WITHOUT_MODEL, Run, command, two_steps_more, up
from topics.actors import ActorStarted, ActorStopped, FleetScaled
from topics.engines import EngineGone, EngineReady
from topics.topic import ACTORS, ENGINES, FLEET

pytestmark = pytest.mark.slow

ON_RAY = pytest.mark.skipif("ASYNCRL_RAY_CAMPAIGN" not in os.environ, reason="minutes: ASYNCRL_RAY_CAMPAIGN=1")
FLEET_OF_TWO = ("--fleet", "engine=2", "rollout=2", "--window", "30", "--wait", "300")
LENT = ('placement.lent=["engine", "rollout"]', "learner.steps=100000", "rollout.slots=4")
SPOTTER = """
from asyncrl import Role
ROLE = Role("spotter", "worker", stops=3, queue="trajectory.generated")
TOPICS = []
async def main(context):
    await context.stop.wait()
"""


class Fact(NamedTuple):
    """A message of a log that was read in the end."""

    at_s: float
    run: str
    message: Any


@asynccontextmanager
async def sharing(folder: Path, *words: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    process = await asyncio.create_subprocess_exec(
        *python("-m", "asyncrl.cli.main", "share", *words),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def says(out: asyncio.StreamReader, words: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while words not in (line := (await out.readline()).decode()):
            assert line, f"it ended before it said {words}"


async def facts_of(*runs: Run) -> list[Fact]:
    found: list[Fact] = []
    for run in runs:
        async with topics_left_by(run) as bus:
            for stream in (ACTORS, ENGINES, FLEET):

                def take(_topic: Any, message: Any, record: Any, name: str = run.root.name) -> None:
                    found.append(Fact(record.time_ns / 1e9, name, message))

                await read_merged(bus, [Part(stream)], take, lambda _record, error: pytest.fail(str(error)))
    return sorted(found, key=lambda fact: fact.at_s)


def ready_s(facts: list[Fact], run: str, since_s: float, until_s: float) -> float:
    """Return the seconds for which engines of a run were ready, those of all added."""
    total, ready = 0.0, dict[str, float]()
    for at_s, name, message in facts:
        if name != run or at_s > until_s:
            continue
        if isinstance(message, EngineReady):
            ready.setdefault(message.engine_id, at_s)
        elif isinstance(message, EngineGone) and message.engine_id in ready:
            total += max(0.0, at_s - max(since_s, ready.pop(message.engine_id)))
    return total + sum(until_s - max(since_s, at_s) for at_s in ready.values())


@pytest.fixture(params=["local", pytest.param("ray", marks=ON_RAY)])
def settings(request, tmp_path: Path) -> Iterator[list[str]]:
    """Settings of both runs: with child processes, or on two nodes that have room for two engines and two workers."""
    if request.param == "local":
        yield [*LENT, *WITHOUT_MODEL, "engine.scripted_mean_s=0.2"]
        return
    with ray_nodes(2, 2) as nodes:
        ray = ['placement.kind="ray"', f'placement.address="{nodes.address}"', f'placement.folder="{tmp_path}/hosts"']
        yield [*LENT, *UNTRAINED, *ray, 'placement.roles=["engine", "rollout"]', 'weights.store="stream"']


async def test_two_runs_share_by_weight_though_the_command_is_killed_and_then_a_run(tmp_path: Path, settings):
    async with up(tmp_path, *settings, "run=a") as a, up(tmp_path, *settings, "run=b") as b:
        async with sharing(tmp_path, "a=0.7", "b=0.3", *FLEET_OF_TWO) as (process, out):
            await says(out, "engine: a 2, b 0")  # b had one first: 1.4 and 0.6
            process.send_signal(signal.SIGKILL)
        await two_steps_more(a, "what was asked for last holds")
        async with sharing(tmp_path, "a=0.7", "b=0.3", *FLEET_OF_TWO) as (process, out):
            for _ in range(3):
                await says(out, "engine: a 1, b 1")
                await says(out, "engine: a 2, b 0")
            await says(out, "engine: a 1, b 1")
            code, said = await command(tmp_path, "share", "a=1", "b=1", *FLEET_OF_TWO)
            assert code == 1, said
            assert "another `asyncrl share` moves processes of run" in said
            _, status = await command(tmp_path, "status", "a")
            assert "by share" in status
            assert " of 0.70 in the last 30" in status

            killed_s = time.time()
            a.process.kill()
            await says(out, "engine: b 2")
            await two_steps_more(b, "it trains on")
            code, said = await command(tmp_path, "down", "b")
            assert code == 0, said
            assert await b.ended() == 0, b.story
            assert await process.wait() == 0

    facts = await facts_of(a, b)
    scaled = [fact for fact in facts if isinstance(fact.message, FleetScaled) and fact.message.by == "share"]
    rises = [at_s for at_s, run, message in scaled if run == "a" and message.wanted.get("engine") == 2]
    first, last = rises[-3], rises[-1]  # two whole rounds of the second process that shared
    assert (scaled[-1].run, scaled[-1].message.wanted["engine"]) == ("b", 2), "what a had went to b"
    worked = {run: ready_s(facts, run, first, last) for run in "ab"}
    print(f"a had {worked['a'] / sum(worked.values()):.3f} of the ready engine-seconds of {last - first:.1f} s")
    assert worked["a"] / sum(worked.values()) == pytest.approx(0.7, abs=0.05), (worked, rises)
    there: set[tuple[str, str]] = set()
    for _, run, message in [fact for fact in facts if fact.at_s < killed_s]:
        if isinstance(message, ActorStarted) and message.role == "engine":
            there.add((run, message.actor_id))
        elif isinstance(message, ActorStopped):
            there.discard((run, message.actor_id))
        assert len(there) <= 2, "an engine starts once another has left its GPU"
    for run in ("a", "b"):
        await audited_clean(tmp_path, run)


async def test_a_run_with_a_users_actor_shares_with_a_run_without_it(tmp_path: Path):
    (tmp_path / "spotter.py").write_text(SPOTTER)
    settings = [*WITHOUT_MODEL, 'placement.lent=["rollout"]', "learner.steps=100000", "rollout.workers=1"]
    async with (
        up(tmp_path, *settings, "run=plain") as plain,
        up(tmp_path, *settings, "run=own", f'actors=["{tmp_path / "spotter.py"}"]') as own,
    ):
        for run in (plain, own):
            await run.reaches(lambda run=run: run.actor("buffer-1"), "a live run")
        async with sharing(tmp_path, "own=0.5", "plain=0.5", "--fleet", "rollout=2", "--wait", "300") as (_, out):
            await says(out, "rollout: own 1, plain 1")
            for run in (plain, own):
                await run.reaches(run.steps, "a step trained by a lent worker")
        for run in (plain, own):
            code, text = await command(tmp_path, "down", run.root.name)
            assert code == 0, text
            assert await run.ended() == 0, run.story
