"""A trainer that sends versions to one real server through its engine actor, as the learner does."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from actors.learner.group import RankProcesses
from actors.learner.publication import publish_version, step
from actors.learner.weight_handles import Offers
from actors.runtime.actor import Context
from actors.supervisor.sweeper import purge_versions
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import WRITER, publish
from asyncrl.config.settings import Config
from asyncrl.config.weights_settings import STORES
from asyncrl.engine.control import read_key
from asyncrl.telemetry.logs import open_log
from asyncrl.training.publisher import Publisher
from asyncrl.weights.files.store import FileStore
from benchmarks.random_model import SHAPES, dtype_of, write_random_model
from benchmarks.stage import Stage, bench_config, report
from benchmarks.stored_batch import store_batch
from benchmarks.talks import write_talking_tokenizer
from topics.actors import VITALS_TAKEN, Vitals
from topics.engines import EngineReady, EngineUpdating
from topics.table import BUILT_IN
from topics.topic import ENGINES, VITALS
from topics.weights import WeightsPublished
from topics.wire import decode

DEADLINE_S = 600.0
STREAM_TOKENS = 8  # of an event of a gateway
_REFUSED = ("weights not taken directly", "weights not staged")


class Served(NamedTuple):
    """A server, the trainer, and the way of the versions."""

    way: str  # a `weights.store`, "staged" for files with `engine.staged`, or a `weights.transport`
    update: str  # a `weights.update`
    kind: str  # of the server
    shape: str  # of the model
    device: str  # of the trainer
    gpus: list[int]  # of the server
    running: int  # concurrent requests
    size: tuple[int, int]  # rows of a step, and tokens of each
    arguments: str  # of SGLang
    pythonpath: str  # folders from which it is imported
    context: int  # context length of the model
    delta: bool = False  # versions are differences from the version before
    lr: float = 1e-6
    gateways: int = 0  # processes; the model's tokens are then characters
    ranks: int = 1  # of the trainer
    layout: Mapping[str, int] = {}  # of the model over the ranks, by megatron; empty: by torch

    @property
    def dtype(self) -> Any:
        """Return the type of the products and of the published weights."""
        return dtype_of(self.kind)

    @property
    def direct(self) -> bool:
        """Return whether versions come directly from the trainer's memory."""
        return self.way not in (*STORES, "staged")

    @property
    def apart(self) -> bool:
        """Return whether trainer and server have separate GPUs."""
        if not self.gpus or not self.device.startswith("cuda"):
            return False
        first = int(self.device.partition(":")[2] or 0)
        return {*self.gpus}.isdisjoint(range(first, first + self.ranks))

    @property
    def learner(self) -> dict[str, Any]:
        """Settings of the trainer."""
        return {
            "trainer": "megatron" if self.layout else "torch",
            "ranks": self.ranks,
            "layout": dict(self.layout),
            "device": self.device,
            "dtype": self.dtype,
            "micro_batch_tokens": self.size[1],
            "compile": False,
            "moments": "bfloat16",  # small, so that a 4B model and a copy to share fit in 80 GB
            "start_s": DEADLINE_S,
        }

    @property
    def store(self) -> str:
        """Return the `weights.store` of the run."""
        return self.way if self.way in STORES else "files"

    def config(self, model: Path) -> Config:
        """Return the config of the run."""
        environment = {"PYTHONPATH": self.pythonpath} if self.pythonpath else {}
        direct = self.way if self.direct else "never"
        gateway = {"count": self.gateways, "port": 0, "stream_tokens": STREAM_TOKENS, "stream_s": 0.0}
        return bench_config(
            "bench-updates",
            model={"path": str(model)},
            gateway=gateway,
            weights={
                "store": self.store,
                "transport": direct,
                "update": self.update,
                "transport_deadline_s": 60.0,
                "delta": "always" if self.delta else "never",
            },
            engine={
                "kind": self.kind,
                "max_running": self.running,
                "gpus": self.gpus,
                "staged": "always" if self.way == "staged" else "never",
                "arguments": shlex.split(self.arguments),
                "environment": environment,
                "start_deadline_s": 400.0,
            },
            learner=self.learner,
        )


class Updates:
    """Steps, copies and versions, and the engine's messages about them."""

    def __init__(self, stage: Stage, served: Served) -> None:
        self.updating: dict[str, float] = {}  # time of `engine.updating`, by key
        self.ready: dict[str, tuple[EngineReady, float]] = {}
        self.announced: dict[str, float] = {}
        self.versions: list[WeightsPublished] = []
        self.stage = stage
        self._served = served
        self._news = asyncio.Event()
        self._begun = 0.0
        self._offers: Offers

    @classmethod
    @asynccontextmanager
    async def opened(cls, served: Served) -> AsyncIterator[Updates]:
        """Start the server and the trainer, with version 0, for the length of the block."""
        with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
            model = Path(scratch) / "model"
            write_random_model(model, SHAPES[served.shape], context=served.context, dtype=served.dtype)
            if served.gateways:
                write_talking_tokenizer(model, SHAPES[served.shape].vocabulary)
            async with Stage.open(served.config(model)) as stage, contextlib.AsyncExitStack() as stack:
                stack.callback(_report_errors, stage)
                updates = cls(stage, served)
                await updates._start(stack)
                yield updates

    async def step(self) -> float:
        """Make a step; return its seconds."""
        began = time.monotonic()
        await step(self._group, self._batch)
        return time.monotonic() - began

    async def copy(self) -> None:
        """Copy the weights, as the learner does between two steps."""
        await self._offers.withdraw()
        await self._group.ask(Publisher.copy_weights, False)

    async def announce(self, number: int) -> WeightsPublished:
        """Store the copied weights, and announce the version."""
        base = self.versions[-1].key if self._served.delta and self.versions else ""
        message = await publish_version(self._group, 0, number, base)
        self.versions.append(message)
        self._offers.open(message.key)
        await publish(self.stage.bus, message, headers={WRITER: "bench"})
        self.announced[message.key] = time.monotonic()
        return message

    async def loaded(self, version: WeightsPublished) -> EngineReady:
        """Wait until the engine has a version."""
        return await self.stage.until(self._loaded(version), DEADLINE_S)

    async def tell_loads(self) -> None:
        """Report the server's figures of its loads; the server needs `--enable-metrics`."""
        ready = next(reversed(self.ready.values()))[0]
        key = read_key(self.stage.files.engine_key_file(self.stage.config.engine, ready.engine_id))
        session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"})
        async with session, session.get(f"{ready.address}/metrics") as response:
            lines = (await response.text()).splitlines()
        for line in lines:
            if "weight_load_duration_seconds" in line and line.partition("{")[0].endswith(("_sum", "_count")):
                report(f"  {line}")

    async def prune(self, version: WeightsPublished) -> None:
        """Remove all versions but one."""
        FileStore(self.stage.files.weights).prune({Path(version.location).name}, (0, version.version))
        await purge_versions(self.stage.bus, {version.location}, (0, version.version))

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        stage = self.stage
        await stage.enter("engine")
        report(f"{self._served.way}, {self._served.update}: the server starts")
        # A server measures the free memory of its GPU at its start, so a trainer on the same GPU starts later.
        context = Context("learner", "learner-1", stage.config, stage.files, stage.bus, open_log(actor="learner-1"))
        context.credentials = stage.files.credentials / "learner.json"
        self._group = RankProcesses(context, lambda: None)
        stack.push_async_callback(self._group.close)
        beside = asyncio.create_task(self._open()) if self._served.apart else None
        await stage.until(stage.follow(VITALS, VITALS_TAKEN, _has_answered), DEADLINE_S)
        report("the server answers")
        reader = LogReader(stage.bus, ENGINES, self._on_record)
        await reader.start()
        stack.push_async_callback(reader.close)
        await (beside or self._open())
        self._offers = Offers(context, lambda: self._group.ask(Publisher.shared))
        await self._offers.start()
        stack.push_async_callback(self._offers.close)
        await self.copy()
        report("the first weights are copied")
        first = await self.announce(0)
        report("they are announced")
        ready = await self.loaded(first)
        report(f"loaded from {ready.direct or 'the store'} {ready.fallback}, pause {ready.pause_s:.3f} s")

    async def _open(self) -> None:
        rows, tokens = self._served.size
        vocabulary = SHAPES[self._served.shape].vocabulary
        report("the trainer loads")
        await self._group.open()
        self._batch = await store_batch(
            self.stage.bus, rows=rows, tokens=tokens, vocabulary=vocabulary, lr=self._served.lr
        )
        await self.step()
        report("the trainer has made a step")

    async def _loaded(self, version: WeightsPublished) -> EngineReady:
        while version.key not in self.ready:
            self._news.clear()
            await self._news.wait()
        return self.ready[version.key][0]

    def _on_record(self, record: Record) -> None:
        topic, now = BUILT_IN.topic_of(record.subject), time.monotonic()
        message: Any = decode(topic.message, record.data) if topic is not None else None
        if isinstance(message, EngineUpdating):
            self._begun = now
        elif isinstance(message, EngineReady):
            self.updating[message.key], self.ready[message.key] = self._begun, (message, now)
            self._news.set()


def _has_answered(record: Record) -> bool:
    vitals = msgspec.json.decode(record.data, type=Vitals)
    return vitals.role == "engine" and "answered_at_s" in vitals.values


def _report_errors(stage: Stage) -> None:
    """Report errors in the engine's logs."""
    for path in sorted(stage.files.logs.glob("engine*")):
        lines = [line for line in path.read_text(errors="replace").splitlines() if _is_error(path, line)]
        for line in lines[-8:]:
            report(f"  {path.name}: {line[:600]}")


def _is_error(path: Path, line: str) -> bool:
    refused = any(words in line for words in _REFUSED) or '"level":"error"' in line.replace(" ", "")
    failed = path.name.endswith("server.log") and ("Error" in line or "NCCL" in line)
    return refused or failed or path.name.endswith(("sender.log", "staging.log"))
