"""Write the logs of a run as its actors would: many trajectories issued, graded, packed and trained."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from actors.prompter.actor import sampling_seed
from actors.supervisor.sweeper import purge
from asyncrl.bus.acks import MESSAGE_ID
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.provision import equal_sizes, provision, stream_states
from asyncrl.bus.publish import BY, WRITER, pack, publish
from asyncrl.bus.server import EmbeddedServer
from asyncrl.config.settings import Config
from asyncrl.data.sources import open_source
from asyncrl.run.directory import RunFiles
from asyncrl.run.opening import run_opened
from asyncrl.run.placement import actor_job, open_placement
from asyncrl.training.checkpoint import Checkpoint, write_checkpoint
from asyncrl.training.objective import objective_of
from benchmarks.stage import BenchError, bench_config, report
from topics.actors import FLEET_SCALED, FleetScaled, KeeperClaimed
from topics.batches import BATCH_PACKED, BATCH_TRAINED, BatchGroup, BatchMember, BatchPacked, BatchTrained
from topics.ids import TASK, prompt_name, trajectory_name
from topics.prompts import PROMPT_ISSUED, PromptIssued
from topics.table import BY_NAME
from topics.topic import BATCHES, FLEET, GRADES, PROMPTS, STREAMS, TRAINING, TRAJECTORIES, Topic
from topics.trajectories import (
    TRAJECTORY_GENERATED,
    TRAJECTORY_GRADED,
    Reference,
    Segment,
    TrajectoryGenerated,
    TrajectoryGraded,
    VersionCount,
)
from topics.weights import CHECKPOINT_SAVED, WEIGHTS_PUBLISHED, CheckpointSaved, WeightsPublished
from topics.wire import Message, headers_of

_TOKENS = 100
_NONCE = "history"
_BURST = 512  # only the last of this many messages is acknowledged: a stream stores them in order
_BYTES = 1500  # of a trajectory on the server's disk, an upper bound
_DIGEST = xxhash.xxh3_128_hexdigest(b"")  # of weights without tensors: the scripted trainer has no tensors
_SNAPSHOT_S = 900.0  # limit for a keeper to fold everything and store its snapshot
_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")
_POLL_S = 0.02
_PLAYING = ("prompter", "buffer")  # when the run is resumed; their logs are long, and they store snapshots
_KEEPERS = (*_PLAYING, "learner", "supervisor")


class Fact(NamedTuple):
    """A message to store."""

    topic: Topic[Any]
    message: Message
    key: str = ""


async def bench_history(*, trajectories: int, directory: str | None, snapshots: bool) -> dict[str, float]:
    """Return the size of a run of this many trajectories, and the cost of its audit and of its keepers' starts.

    Args:
        directory: folder that keeps the run, named `history`; None for a temporary one.
        snapshots: see `write_history`.

    Raises:
        BenchError: the logs are incomplete, or the audit failed.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True) as temporary:
        folder = Path(directory or temporary)
        steps = trajectories // 256 + 1000  # more than are written, so the run can be resumed
        config = bench_config("history", directory=str(folder), learner={"steps": steps})
        report(f"writing the logs of {trajectories:,} trajectories")
        began = time.monotonic()
        await write_history(folder, config, trajectories, snapshots=snapshots)
        figures = {"write_s": time.monotonic() - began}
        return figures | await _read_again(RunFiles(folder / config.run), trajectories)


async def write_history(folder: Path, config: Config, trajectories: int, *, snapshots: bool = False) -> History:
    """Write a stopped run with this many trajectories, in which only prompter and buffer continue.

    Args:
        folder: holds the run's directory afterwards; `asyncrl up --resume` takes it.
        snapshots: whether prompter and buffer fold the logs once and store snapshots, as in a long run.
    """
    files = RunFiles(folder / config.run)
    files.logs.mkdir(parents=True)
    every = min(trajectories, config.supervision.snapshot_every)
    supervision = msgspec.structs.replace(config.supervision, snapshot_every=every)
    config = msgspec.structs.replace(config, supervision=supervision)
    files.config.write_bytes(msgspec.json.encode(config))
    (files.root / "base").write_text(str(folder))
    server = EmbeddedServer(files.root, run=config.run)
    bus = await Bus.connect(await server.start(), config.run, name="bench")
    try:
        sizes = equal_sizes(payload_mb=8, ledger_mb=1 + trajectories * _BYTES // 1_000_000)
        await provision(bus, sizes, lease_s=config.workers.lease_s)
        await publish(bus, run_opened(config, files))
        history = History(bus, config)
        await history.write(trajectories)
        await history.save(files.checkpoints)
        await history.put([Fact(FLEET_SCALED, FleetScaled(dict.fromkeys(_PLAYING, 1)))])
        if snapshots:
            await _take_snapshots(files, bus)
    finally:
        await bus.close()
        await server.stop()
    return history


class History:
    """Stores all messages of the actors of a run without a warm-up, in the order of time."""

    def __init__(self, bus: Bus, config: Config) -> None:
        self.bus = bus
        self._config = config
        self._batch_groups = config.buffer.batch_groups
        self._size = config.rollout.group_size
        task = config.task
        self._rows = open_source(task.source, options=task.options, seed=config.seed, base=Path())
        self._references: dict[str, Reference] = {}  # results that no batch holds yet
        self._packed: dict[int, int] = {}  # sequences of the newest batches, by step
        self.steps = 0  # batches packed and trained so far
        self.issued = 0  # groups
        self.graded = 0

    async def write(self, trajectories: int) -> None:
        """Write at least this many trajectories, from their issue to the step that trained them, and the open groups.

        Raises:
            BenchError: a message is missing in the streams.
        """
        for stream in (PROMPTS, BATCHES, TRAINING, FLEET):
            claim = KeeperClaimed(stream.keeper, f"{stream.keeper}-1", _NONCE)
            await self.put([Fact(BY_NAME[f"{stream.keeper}.claimed"], claim)])
        steps = -(-trajectories // (self._batch_groups * self._size))
        await self.put([self._published(0)])
        await self._issue((self._config.buffer.max_lag + 1) * self._batch_groups)
        for step in range(1, steps + 1):
            await self.grade(self._batch_groups)
            await self._pack(step)
            await self.train()
            # The trimmer also purges the results of trained batches; here only those of the newest batch stay.
            await purge(self.bus, TRAJECTORIES, [{"seq": (step - 1) * self._batch_groups * self._size + 1}])
            await self.put([self._published(step)])
            if step % self._config.learner.checkpoint_every == 0:
                await self.put([self._saved("")])
            await self._issue(self._batch_groups)
        await self._check()

    async def grade(self, groups: int) -> None:
        """Write results and grades of the next groups."""
        first, self.graded = self.graded, self.graded + groups
        members = [(number, member) for number in range(first, self.graded) for member in range(self._size)]
        await self.put(self._result(*member) for member in members)
        await self.put(self._grade(*member) for member in members)

    async def train(self) -> None:
        """Write the next step."""
        self.steps += 1
        step = self.steps
        rewards = [float(member % 2) for member in range(self._size)]
        mean = sum(rewards) / self._size
        deviation = (sum((reward - mean) ** 2 for reward in rewards) / self._size) ** 0.5
        message = BatchTrained(
            step=step,
            lineage=0,
            stage="rl",
            metrics={"loss": 0.0},
            lags={step - 1 - self._version(step): self._batch_groups * self._size * _TOKENS},
            masked=0,
            rewards=[mean, deviation],
            trajectories=self._batch_groups * self._size,
            batch_sequence=await self._sequence(step),
        )
        await self.put([Fact(BATCH_TRAINED, message)])

    async def save(self, folder: Path) -> None:
        """Save a checkpoint of the last step that a learner with a scripted trainer can load."""
        checkpoint = Checkpoint(0, self.steps, _DIGEST, self._packed[self.steps])
        await self.put([self._saved(str(write_checkpoint(folder, checkpoint, lambda _: {})))])

    async def put(self, facts: Iterable[Fact]) -> int:
        """Store facts of one stream in order; returns the sequence of the last."""
        sequence, number, last = 0, 0, None
        for number, fact in enumerate(facts, 1):
            if last is not None:
                sequence = await self._store(last, acknowledged=number % _BURST == 0) or sequence
            last = fact
        return await self._store(last, acknowledged=True) if last is not None else sequence

    async def _store(self, fact: Fact, *, acknowledged: bool) -> int:
        topic, message, key = fact
        headers = headers_of(message)
        body = pack(message, topic)
        headers |= {MESSAGE_ID: f"{topic.name}:{xxhash.xxh3_64_hexdigest(body)}", BY: "bench"}
        if topic.stream.keeper:
            headers |= {WRITER: _NONCE, BY: f"{topic.stream.keeper}-1"}
        if acknowledged:
            return (await self.bus.store(topic.subject(self.bus.run, key), body, headers)).seq
        await self.bus.client.publish(topic.ingest(self.bus.run, key), body, headers=headers)
        return 0

    async def _check(self) -> None:
        """Check that no message was lost whose publish was not acknowledged."""
        graded, claims = self.graded * self._size, 1
        states = await stream_states(self.bus, [PROMPTS, TRAJECTORIES, GRADES])
        wanted = {PROMPTS: self.issued * self._size + claims, TRAJECTORIES: graded, GRADES: graded}
        for stream, count in wanted.items():
            if (found := states[stream.name]["last_seq"]) < count:
                raise BenchError(f"run {self.bus.run}: {stream.name} got {found:,} messages, {count:,} were published")

    def _version(self, step: int) -> int:
        """Return the version that sampled a step's batch: one step old."""
        return max(0, step - 2)

    async def _issue(self, groups: int) -> None:
        first, self.issued = self.issued, self.issued + groups
        await self.put(
            self._prompt(number, member) for number in range(first, self.issued) for member in range(self._size)
        )

    def _prompt(self, number: int, member: int) -> Fact:
        name = trajectory_name(prompt_name(TASK, number), member)
        message = PromptIssued(
            prompt_id=prompt_name(TASK, number),
            member=member,
            group_size=self._size,
            rows=[] if member else [self._rows.row(number)],
            min_version=max(0, self.steps - self._config.buffer.max_lag),
            seed=sampling_seed(self._config.seed, name, 0),
        )
        return Fact(PROMPT_ISSUED, message, name)

    def _result(self, number: int, member: int) -> Fact:
        prompt_id, version = prompt_name(TASK, number), self._version(number // self._batch_groups + 1)
        tokens = np.full(_TOKENS, number % 64, np.int32)
        ones, versions = np.ones(_TOKENS, np.uint8), np.full(_TOKENS, version, np.int32)
        message = TrajectoryGenerated(
            trajectory_id=trajectory_name(prompt_id, member),
            prompt_id=prompt_id,
            member=member,
            group_size=self._size,
            stage="rl",
            rows=[self._rows.row(number)],
            segments=[Segment(tokens, ones, np.full(_TOKENS, -1.0, np.float32), versions)],
            completion="an answer",
            versions=[VersionCount(version, _TOKENS)],
        )
        body = pack(message, TRAJECTORY_GENERATED)
        reference = Reference(number * self._size + member + 1, xxhash.xxh3_64_hexdigest(body), len(body))
        self._references[message.trajectory_id] = reference
        return Fact(TRAJECTORY_GENERATED, message, message.trajectory_id)

    def _grade(self, number: int, member: int) -> Fact:
        prompt_id = prompt_name(TASK, number)
        message = TrajectoryGraded(
            trajectory_id=trajectory_name(prompt_id, member),
            prompt_id=prompt_id,
            member=member,
            group_size=self._size,
            stage="rl",
            payload=self._references[trajectory_name(prompt_id, member)],
            versions=[VersionCount(self._version(number // self._batch_groups + 1), _TOKENS)],
            lengths=[_TOKENS],
            reward=float(member % 2),
        )
        return Fact(TRAJECTORY_GRADED, message, message.trajectory_id)

    async def _pack(self, step: int) -> None:
        first = (step - 1) * self._batch_groups
        groups = [
            BatchGroup(prompt_name(TASK, number), list(self._members(number)))
            for number in range(first, first + self._batch_groups)
        ]
        objective = objective_of(self._config, step)
        message = BatchPacked(step, "rl", groups, step - 1 - self._config.buffer.max_lag, objective)
        self._packed = {step: await self.put([Fact(BATCH_PACKED, message)])}

    def _members(self, number: int) -> Iterator[BatchMember]:
        name = prompt_name(TASK, number)
        for member in range(self._size):
            trajectory_id = trajectory_name(name, member)
            reference = self._references.pop(trajectory_id)
            yield BatchMember(trajectory_id, 0, reference, float(member % 2), _TOKENS, lengths=[_TOKENS])

    async def _sequence(self, step: int) -> int:
        """Return the sequence of a step's batch; a buffer that continues may have packed it."""
        if step not in self._packed:
            newest = await read_last(self.bus, BATCH_PACKED)
            assert newest is not None
            self._packed = {step: newest.sequence}
        return self._packed[step]

    def _published(self, version: int) -> Fact:
        location = f"lineage0-v{version:06d}-{_DIGEST[:12]}"
        return Fact(WEIGHTS_PUBLISHED, WeightsPublished(0, version, _DIGEST, "files", location))

    def _saved(self, path: str) -> Fact:
        return Fact(CHECKPOINT_SAVED, CheckpointSaved(0, self.steps, _DIGEST, path, self._packed[self.steps]))


async def _take_snapshots(files: RunFiles, bus: Bus) -> None:
    """Let the real keepers fold the logs once, until each has stored a snapshot."""
    for role in _PLAYING:
        async with _playing(files, bus, role, BY_NAME[f"{role}.snapshot"]):
            pass


async def _read_again(files: RunFiles, trajectories: int) -> dict[str, float]:
    """Return the sizes of the logs, and the cost of an audit and of the starts of the keepers."""
    run = files.root.name
    server = EmbeddedServer(files.root, run=run)
    address = await server.start(_SNAPSHOT_S)
    try:
        bus = await Bus.connect(address, run, name="bench")
        states = await stream_states(bus, [stream for stream in STREAMS if stream in (PROMPTS, GRADES, BATCHES)])
        figures = {f"{name.lower()}_log_bytes_a_trajectory": states[name]["bytes"] / trajectories for name in states}
        password = files.root / "password"
        password.touch(0o600)
        password.write_text(address.password)
        at = ["--url", address.url, "--user", address.user, "--password-file", str(password)]
        figures |= await asyncio.to_thread(_audited, ["audit", run, "--deep", *at])
        for role in _KEEPERS:
            figures |= await _started(files, bus, role)
        await bus.close()
        return figures
    finally:
        await server.stop()


def _audited(words: list[str]) -> dict[str, float]:
    """Return seconds and peak memory of an audit in a separate process; its output goes to stderr."""
    began, peak_mb = time.monotonic(), 0.0
    process = subprocess.Popen([sys.executable, "-m", "asyncrl.cli.main", *words], stdout=sys.stderr)
    while process.returncode is None:
        peak_mb = max(peak_mb, _peak_mb(process.pid))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
    if process.returncode:
        raise BenchError(f"asyncrl {words[0]} ended with code {process.returncode}")
    return {"audit_s": time.monotonic() - began, "audit_memory_mb": peak_mb}


async def _started(files: RunFiles, bus: Bus, role: str) -> dict[str, float]:
    """Return seconds from the start of a keeper to its claim, and its peak memory until then.

    Raises:
        BenchError: the keeper does not start.
    """
    began = time.monotonic()
    async with _playing(files, bus, role, BY_NAME[f"{role}.claimed"]) as pid:
        return {f"{role}_start_s": time.monotonic() - began, f"{role}_memory_mb": _peak_mb(pid)}


@contextlib.asynccontextmanager
async def _playing(files: RunFiles, bus: Bus, role: str, topic: Topic[Any]) -> AsyncIterator[int]:
    """Start a keeper, wait until it has published a new message of a topic, and yield its process id.

    Raises:
        BenchError: the keeper publishes no such message.
    """
    before = await read_last(bus, topic)
    job = actor_job(files.credentials, bus.run, role, f"{role}-1")
    process = await open_placement(files.read_config(), files).start(job)
    try:
        async with asyncio.timeout(_SNAPSHOT_S):
            while await read_last(bus, topic) == before:
                if process.returncode is not None:
                    raise BenchError(f"run {bus.run}: {role}-1 ended with code {process.returncode}")
                await asyncio.sleep(_POLL_S)  # polls until the keeper publishes a message
        yield process.pid
    except TimeoutError:
        raise BenchError(f"run {bus.run}: no {topic.name} within {_SNAPSHOT_S:.0f} s") from None
    finally:
        process.terminate()
        await process.wait()


def _peak_mb(pid: int) -> float:
    """Return the peak memory of a process so far; 0 if the process has just ended."""
    found = _PEAK.search(Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 / 1e6 if found else 0.0
