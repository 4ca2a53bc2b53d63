"""Time from SIGKILL to recovery of every role in real runs of `asyncrl up`, with its supervisor's back-off."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import LogReader, Record
from asyncrl.run.directory import RunFiles
from asyncrl.run.fault_injection import NATS, SERVER, Part
from benchmarks.chaos.stage import Stage
from benchmarks.chaos.witness import Witness
from benchmarks.history import write_history
from benchmarks.stage import BenchError, bench_config
from topics.batches import BATCH_PACKED
from topics.prompts import PROMPT_ISSUED
from topics.table import BY_NAME
from topics.topic import BATCHES, PROMPTS, Stream, Topic

T = TypeVar("T")

_LIMIT_S = 90.0  # limit for any worker to recover
_POLL_S = 0.01
_LEASE_S = 2.0
_CHECKPOINT_EVERY = 20
_SMALL = f"""
run = "recovery"
[task]
options = {{ letters = 4 }}
[warmup]
steps = 4
batch_rows = 32
rows_per_trajectory = 16
[rollout]
workers = 2
group_size = 4
max_new_tokens = 7
[workers]
lease_s = {_LEASE_S}
[buffer]
batch_groups = 8
[learner]
steps = 100000
checkpoint_every = {_CHECKPOINT_EVERY}
[eval]
prompts = 8
every = 5
"""


async def bench_recovery(*, messages: int, kills: int) -> dict[str, float]:
    """Return seconds until each role recovers after a SIGKILL; medians.

    Args:
        messages: trajectories issued, and as many graded, before prompter and buffer are killed.
        kills: number of kills of each role.

    Raises:
        ChaosError: a run did not start.
        BenchError: a role did not recover.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True) as directory:
        folder = Path(directory)
        times = await of_long_logs(folder, messages, kills)
        times |= await _of_a_whole_run(folder, kills)
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


class Killed(NamedTuple):
    """Times at which a process was killed and had ended, ns since the epoch."""

    at_ns: int
    gone_ns: int

    def seconds_to(self, time_ns: int) -> float:
        """Return seconds from the kill to a time."""
        return (time_ns - self.at_ns) / 1e9


class _Run:
    """A run of `asyncrl up` whose processes are killed."""

    def __init__(self, stage: Stage, running: asyncio.Task[int]) -> None:
        self._stage = stage
        self._running = running
        self.files = RunFiles(stage.root)
        self.measured = ""  # name of the current figure
        self.bus: Bus

    @classmethod
    @asynccontextmanager
    async def up(cls, folder: Path, *words: str) -> AsyncIterator[_Run]:
        """Start the run for the length of the block."""
        stage = Stage(folder)
        try:
            run = cls(stage, await stage.start(words))
            await run.until(run._connect())
            yield run
            await run.bus.close()
        finally:
            await stage.stop()

    async def _connect(self) -> None:
        await _holds(self.files.address.exists)
        self.bus = await Bus.connect(BusAddress.read(self.files.address), self._stage.root.name, name="bench")

    async def until(self, event: Awaitable[T]) -> T:
        """Wait for an event, unless the run ends or the time runs out.

        Raises:
            BenchError: the run ended, or the time ran out.
        """
        waiting = asyncio.ensure_future(event)
        waits: set[asyncio.Future[Any]] = {waiting, self._running}
        try:
            await asyncio.wait(waits, timeout=_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
        finally:
            waiting.cancel()
        why = "it ended" if self._running.done() else f"nothing happened within {_LIMIT_S:.0f} s"
        raise BenchError(f"run {self._stage.root.name} {self.measured}: {why}; its last output:\n{self._stage.words}")

    async def kill(self, role: str) -> Killed:
        """Kill one process of a role, and return once it has ended."""
        part = await self.until(self._part(role))
        killed_ns = time.time_ns()
        part.process.kill()
        await asyncio.to_thread(part.process.wait, _LIMIT_S)
        return Killed(killed_ns, time.time_ns())

    async def _part(self, role: str) -> Part:
        while True:
            for part in self._stage.parts():
                if part.role == role:
                    return part
            await asyncio.sleep(0.05)  # no event announces it

    async def first_ns(self, stream: Stream, topic: Topic[Any], since_ns: int = 0, after: int = 0) -> int:
        """Return the time of the first message on a topic after a given time, ns."""
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def take(record: Record) -> None:
            if record.time_ns > since_ns and not found.done():
                found.set_result(record.time_ns)

        subjects = [topic.pattern(self.bus.run)]
        reader = LogReader(self.bus, stream, take, after=after, subjects=subjects, headers_only=True)
        await reader.start()
        try:
            return await self.until(found)
        finally:
            await reader.close()


async def _holds(condition: Callable[[], bool]) -> None:
    """Wait for a condition that no event announces."""
    while True:
        if condition():
            return
        await asyncio.sleep(_POLL_S)


# --- prompter and buffer over long logs: the measurement simulates all other actors


async def of_long_logs(folder: Path, messages: int, kills: int) -> dict[str, list[float]]:
    """Return seconds from each kill of prompter and buffer to their next decision, under a real supervisor."""
    config = bench_config(
        "long", directory=str(folder), learner={"steps": messages // 256 + 1000}, engine={"kind": "scripted"}
    )
    history = await write_history(folder, config, messages)
    times: dict[str, list[float]] = {"prompter_s": [], "buffer_s": []}
    async with _Run.up(folder / "long-crashes", "--resume", str(folder / config.run)) as run:
        history.bus = run.bus
        for stream in (PROMPTS, BATCHES):
            await run.first_ns(stream, BY_NAME[f"{stream.keeper}.claimed"])
        for _ in range(kills):
            # The batch lacks one group, which arrives after the buffer has been killed.
            await history.grade(config.buffer.batch_groups - 1)
            killed = await run.kill("buffer")
            await history.grade(1)
            times["buffer_s"].append(killed.seconds_to(await run.first_ns(BATCHES, BATCH_PACKED, killed.gone_ns)))
            killed = await run.kill("prompter")
            await history.train()
            times["prompter_s"].append(killed.seconds_to(await run.first_ns(PROMPTS, PROMPT_ISSUED, killed.gone_ns)))
    return times


# --- all other roles, in a run that trains a small model


async def _of_a_whole_run(folder: Path, kills: int) -> dict[str, list[float]]:
    config = folder / "recovery.toml"
    config.write_text(f'directory = "{folder}"\n{_SMALL}')
    times: dict[str, list[float]] = {}
    async with _Run.up(folder / "crashes", str(config)) as run:
        witness = Witness(run.bus)
        await run.until(_provisioned(witness.start))
        measures: dict[str, Callable[[], Awaitable[float]]] = {
            "learner_s": partial(_learner, run, witness),
            "engine_s": partial(_works_again, run, witness, "engine"),
            "engine_server_s": partial(_works_again, run, witness, SERVER),
            "nats_s": partial(_works_again, run, witness, NATS),
            "beyond_lease_s": partial(_lease, run, witness),
            "reward_s": partial(_works_again, run, witness, "reward"),
            "recorder_s": partial(_recorder, run),
            "supervisor_s": partial(_works_again, run, witness, "supervisor", "learner"),
        }
        for _ in range(kills):
            for name, measure in measures.items():
                run.measured = name
                await run.until(_two_steps_more(witness))  # so that no role is killed while another recovers
                times.setdefault(name, []).append(await measure())
        await witness.close()
    return times


async def _provisioned(start: Callable[[], Awaitable[None]]) -> None:
    """Start a reader as soon as the topics exist."""
    while True:
        try:
            return await start()
        except BusError:
            await asyncio.sleep(0.1)  # no event announces it


async def _two_steps_more(witness: Witness) -> None:
    await _holds(lambda: witness.step is not None)
    step = witness.step or 0
    await _holds(lambda: (witness.step or 0) >= step + 2)


async def _works_again(run: _Run, witness: Witness, role: str, again: str = "") -> float:
    """Kill a role's process, and wait until the role (or the last role of `again`) has recovered."""
    killed = await run.kill(role)
    return killed.seconds_to(await run.until(witness.works_again(again or role, killed.gone_ns)))


async def _learner(run: _Run, witness: Witness) -> float:
    """Kill the learner half-way between two checkpoints."""
    await run.until(_holds(lambda: (witness.step or 0) % _CHECKPOINT_EVERY == _CHECKPOINT_EVERY // 2))
    return await _works_again(run, witness, "learner")


async def _recorder(run: _Run) -> float:
    """Kill the recorder, and wait until its file has grown."""
    metrics = run.files.root / "metrics.jsonl"
    killed = await run.kill("recorder")
    size = metrics.stat().st_size
    await run.until(_holds(lambda: metrics.stat().st_size > size))
    return killed.seconds_to(time.time_ns())


async def _lease(run: _Run, witness: Witness) -> float:
    """Kill a worker, and wait until another has finished its last trajectory; return the time beyond the lease."""
    while True:
        killed = await run.kill("rollout")
        held = witness.issued - witness.ended.keys()
        await run.until(_holds(partial(witness.ended.keys().__ge__, held)))
        taken = [time_ns for name in held for delivery, time_ns in [witness.ended[name]] if delivery > 1]
        if taken:
            return killed.seconds_to(max(taken)) - _LEASE_S
