"""Weights from a trainer to one engine under load: out of the store, and the direct way.

The trainer and the learner's part are in this process, the requests in another one; server and engine actor are real.
"""

from __future__ import annotations

import asyncio
import itertools
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from actors.learner.offers import Offers
from actors.runtime.actor import Context
from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import WRITER, publish
from asyncrl.config.settings import Config
from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.control import read_key
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.generator import Generator, Manner, Watch
from asyncrl.telemetry.logs import open_log
from asyncrl.training.publisher import Publisher
from asyncrl.training.torch_trainer import TorchSettings, TorchTrainer
from asyncrl.weights.files import FileStore
from benchmarks.learner_process import train_row
from benchmarks.random_model import SHAPES, write_random_model
from benchmarks.stage import BenchError, Stage, bench_config, report
from topics.actors import VITALS_TAKEN, Vitals
from topics.batches import Objective
from topics.engines import EngineReady, EngineUpdating
from topics.table import topic_of
from topics.topic import ENGINES, VITALS
from topics.weights import WeightsPublished
from topics.wire import decode

_DEADLINE_S = 600.0
_LOADED_S = 20.0  # for the requests to run
_PROMPT, _NEW, _WARM = 128, 1_000, 1
_REFUSED = "weights not taken directly"


class Setup(NamedTuple):
    """One measurement."""

    way: str  # "files", or a `weights.direct`
    update: str  # a `weights.update`
    kind: str  # of the server
    shape: str  # of the model
    device: str  # of the trainer
    gpus: list[int]  # of the server
    running: int  # requests
    rounds: int
    size: tuple[int, int]  # rows of a step, and tokens of each
    arguments: str  # of SGLang
    pythonpath: str  # with which it is imported


async def bench_direct(*, ways: list[str], updates: list[str], **options: Any) -> dict[str, float]:
    """Measure each way with each kind of update.

    Returns:
        Medians, the way and the update in front: seconds from the end of a step until the next one may begin
        (`copy_s`), by which the next step is later (`standstill_s`), from the end of a step to the announcement and to
        `engine.ready`, from `engine.updating` to `engine.ready` (`update_s`), the longest time without a token
        (`silence_s`), from `engine.ready` until 95 of 100 requests have a token again (`again_s`); and the share of the
        versions that came that way.

    Raises:
        BenchError: an actor fell, or the engine did not confirm a version in time.
    """
    figures: dict[str, float] = {}
    for way in ways:
        for update in updates:
            setup = Setup(way, update, **options)
            try:
                found = await _measured(setup)
            except (BenchError, TimeoutError, OSError, RuntimeError) as error:
                report(f"{way}, {update}: FAILED: {type(error).__name__}: {error}")
                found = {"failed": 1.0}
            figures |= {f"{way}_{update}_{name}": value for name, value in found.items()}
    return figures


async def _measured(setup: Setup) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        model = Path(scratch) / "model"
        dtype = "float32" if setup.kind == "embedded" else "bfloat16"
        write_random_model(model, SHAPES[setup.shape], context=max(_PROMPT + 2 * _NEW, setup.size[1]), dtype=dtype)
        async with Stage.open(_config(setup, model)) as stage:
            try:
                return await _Learner(stage, setup, model, dtype).measure()
            finally:
                for path in sorted(stage.files.logs.glob("engine*")):
                    lines = [line for line in path.read_text(errors="replace").splitlines() if _telling(path, line)]
                    for line in lines[-8:]:
                        report(f"  {path.name}: {line[:600]}")


def _telling(path: Path, line: str) -> bool:
    return _REFUSED in line or '"level":"error"' in line.replace(" ", "") or path.name.endswith("sender.log")


def _config(setup: Setup, model: Path) -> Config:
    environment = {"PYTHONPATH": setup.pythonpath} if setup.pythonpath else {}
    direct = "never" if setup.way == "files" else setup.way
    return bench_config(
        "bench-direct",
        model={"path": str(model)},
        weights={"direct": direct, "update": setup.update, "direct_deadline_s": 60.0},
        engine={
            "kind": setup.kind,
            "max_running": setup.running,
            "gpus": setup.gpus,
            "arguments": shlex.split(setup.arguments),
            "environment": environment,
            "start_deadline_s": 400.0,
        },
        learner={},
    )


class _Learner:
    """Steps, copies and versions as the learner makes them."""

    def __init__(self, stage: Stage, setup: Setup, model: Path, dtype: str) -> None:
        self._stage = stage
        self._setup = setup
        self._model = model
        self._dtype: Any = dtype
        self._news = asyncio.Event()
        self._begun = 0.0
        self._updating: dict[str, float] = {}  # when, by version
        self._ready: dict[str, tuple[EngineReady, float]] = {}
        self._figures: dict[str, list[float]] = {}

    async def measure(self) -> dict[str, float]:
        """Figures of so many versions."""
        stage, setup = self._stage, self._setup
        await stage.enter("engine")
        report(f"{setup.way}, {setup.update}: the server starts")
        await stage.until(
            stage.follow(VITALS, VITALS_TAKEN, lambda record: "answered_at_s" in _vitals(record)), _DEADLINE_S
        )
        reader = LogReader(stage.bus, ENGINES, self._on_record)
        await reader.start()
        log = open_log(actor="learner-1")
        context = Context("learner", "learner-1", stage.config, stage.files, stage.bus, log)
        report("the trainer loads")
        await asyncio.to_thread(self._open)
        offers = Offers(context, lambda: asyncio.to_thread(self._publisher.shared))
        await offers.start()
        first = await self._version(offers, 0)
        await stage.until(self._has(first), _DEADLINE_S)
        load = await _Load.start(stage, setup)
        await asyncio.sleep(_LOADED_S if setup.kind == "sglang" else 3.0)
        alone = [await self._timed_step() for _ in range(3)][1:]
        versions: list[WeightsPublished] = []
        for number in range(1, setup.rounds + _WARM + 1):
            if number == _WARM + 1:
                self._figures.clear()
                versions.clear()
            versions.append(await stage.until(self._round(offers, number, min(alone)), _DEADLINE_S))
            await asyncio.sleep(2.0)
        came = [self._ready[version.key][0].direct == setup.way for version in versions]
        events = await load.end()
        for version in versions:
            self._note(**_silence(events, self._updating[version.key], self._ready[version.key][1], setup.running))
        await offers.close()
        await reader.close()
        medians = {name: statistics.median(values) for name, values in self._figures.items()}
        direct = {} if setup.way == "files" else {"share_direct": sum(came) / len(came)}
        return {"step_s": min(alone), **medians, **direct}

    def _open(self) -> None:
        setup = self._setup
        rows, tokens = setup.size
        settings = TorchSettings(
            device=setup.device, dtype=self._dtype, micro_batch_tokens=tokens, shares=setup.way != "files"
        )
        self._trainer = TorchTrainer(self._model, settings)
        store = FileStore(self._stage.files.weights.absolute())
        self._publisher = Publisher(self._trainer, store=store, checkpoints=Path())
        self._rows = [train_row(number, tokens, SHAPES[setup.shape].vocabulary) for number in range(rows)]
        self._step()

    def _step(self) -> None:
        self._trainer.step(self._rows, Objective(learning_rate=1e-6))

    async def _timed_step(self) -> float:
        began = time.monotonic()
        await asyncio.to_thread(self._step)
        return time.monotonic() - began

    async def _version(self, offers: Offers, number: int) -> WeightsPublished:
        """Copy the weights away, store them, and announce them."""
        await offers.withdraw()
        await asyncio.to_thread(self._publisher.copy_weights)
        return await self._announce(offers, number)

    async def _announce(self, offers: Offers, number: int) -> WeightsPublished:
        message = await asyncio.to_thread(self._publisher.publish, lineage=0, version=number)
        offers.open(message.key)
        await publish(self._stage.bus, message, headers={WRITER: "bench"})
        return message

    async def _round(self, offers: Offers, number: int, alone_s: float) -> WeightsPublished:
        """A step, its version, and the next step beside it."""
        await self._timed_step()
        ended = time.monotonic()
        await offers.withdraw()
        await asyncio.to_thread(self._publisher.copy_weights)
        copied = time.monotonic()
        announcing = asyncio.create_task(self._announce(offers, number))
        beside_s = await self._timed_step()
        message = await announcing
        announced = time.monotonic()
        await self._has(message)
        ready, at = self._ready[message.key]
        self._note(copy_s=copied - ended, standstill_s=copied - ended + beside_s - alone_s)
        self._note(announced_s=announced - ended, ready_s=at - ended, update_s=ready.update_s)
        FileStore(self._stage.files.weights).prune({Path(message.location).name}, (0, number))
        report(f"version {number}: {ready.direct or 'files'}, ready {at - ended:.3f} s after its step")
        return message

    def _note(self, **figures: float) -> None:
        for name, value in figures.items():
            self._figures.setdefault(name, []).append(value)

    def _on_record(self, record: Record) -> None:
        topic, now = topic_of(record.subject), time.monotonic()
        message: Any = decode(topic.message, record.data) if topic is not None else None
        if isinstance(message, EngineUpdating):
            self._begun = now
        elif isinstance(message, EngineReady):
            self._updating[message.key], self._ready[message.key] = self._begun, (message, now)
            self._news.set()

    async def _has(self, version: WeightsPublished) -> None:
        while version.key not in self._ready:
            self._news.clear()
            await self._news.wait()


class _Load:
    """Requests that are sent by a process of their own, and the times at which their tokens come."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, stage: Stage, setup: Setup) -> _Load:
        key = stage.files.engine_key_file(stage.config.engine, "engine-1")
        words = [str(stage.files.credentials / "rollout.json"), stage.config.run, str(key), str(setup.running)]
        words += [setup.update, str(SHAPES[setup.shape].vocabulary)]
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-m", "benchmarks.direct", *words]
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))

    async def end(self) -> list[tuple[float, int]]:
        """End it; returns when tokens came, and for which request."""
        output, _ = await self._process.communicate(b"")
        return msgspec.msgpack.decode(output, type=list[tuple[float, int]])


def _silence(events: list[tuple[float, int]], updating: float, ready: float, running: int) -> dict[str, float]:
    """The longest time without a token around an update, and how long after it most requests had one again."""
    times = [at for at, _ in events if updating - 1.0 <= at <= ready + 5.0]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    again: set[int] = set()
    for at, request in events:
        if at > ready:
            again.add(request)
            if len(again) >= 0.95 * running:
                return {"silence_s": max(gaps, default=0.0), "again_s": at - ready}
    return {"silence_s": max(gaps, default=0.0)}


def _vitals(record: Record) -> dict[str, float]:
    vitals = msgspec.json.decode(record.data, type=Vitals)
    return vitals.values if vitals.role == "engine" else {}


class _Events(Watch):
    """Notes when tokens of one request come."""

    def __init__(self, number: int, events: list[tuple[float, int]]) -> None:
        self._number, self._events = number, events

    def on_tokens(self, tokens: int, discarded: int, lineage: int) -> None:
        """See `Watch`."""
        self._events.append((time.monotonic(), self._number))


async def _send(address: Path, run: str, key_file: Path, running: int, update: str, vocabulary: int) -> None:
    """Keep so many requests under way until stdin is closed, then write when their tokens came."""
    bus, events = await Bus.connect(BusAddress.read(address), run), list[tuple[float, int]]()
    faults = list[BaseException]()
    fleet = Fleet(lambda _, found: EngineClient(found, api_key=read_key(key_file)), counts={}, fail=faults.append)

    def take(record: Record) -> None:
        topic = topic_of(record.subject)
        if topic is not None and topic.name in ("engine.ready", "engine.updating", "engine.gone"):
            fleet.apply(decode(topic.message, record.data))

    reader = LogReader(bus, ENGINES, take)
    await reader.start()
    model = ModelInfo("any", vocabulary, _PROMPT + 2 * _NEW)
    generator = Generator(fleet, model, str, counts={}, manner=Manner(in_place=update == "in_place"))

    async def ask(number: int) -> None:
        rng = np.random.default_rng(number)
        while True:
            ids = rng.integers(3, vocabulary, _PROMPT).astype(np.int32)
            tokens = int(rng.integers(_NEW // 2, _NEW))
            await generator.generate(ids, SamplingParams(tokens, ignore_eos=True), watch=_Events(number, events))

    tasks = [asyncio.create_task(ask(number)) for number in range(running)]
    closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    done, _ = await asyncio.wait([closed, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in done - {closed}:
        print(f"a request ended: {task.exception()}", file=sys.stderr)
    await closed
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    sys.stdout.buffer.write(msgspec.msgpack.encode(events))
    await fleet.close()
    await reader.close()
    await bus.close()


if __name__ == "__main__":
    import uvloop

    place, name, key, count, how, words = sys.argv[1:]
    uvloop.run(_send(Path(place), name, Path(key), int(count), how, int(words)))
