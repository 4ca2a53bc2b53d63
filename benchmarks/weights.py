"""Weights to engines of one host: time of the publication, and time until the last engine has them.

The engines are real servers with their actors; this program writes versions as a learner does.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from actors.supervisor.sweeper import purge_versions
from asyncrl.bus.chunks import ChunkLog
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import WRITER, publish
from asyncrl.config.weights_settings import store_kind
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.control import read_key
from asyncrl.weights import versions
from asyncrl.weights.delta import Base, encode
from asyncrl.weights.files.store import FileStore
from asyncrl.weights.store import StorePlace
from asyncrl.weights.tensors import HostTensor
from benchmarks.random_model import Shape, write_random_model
from benchmarks.stage import Stage, bench_config, report
from topics.engines import ENGINE_READY, EngineReady
from topics.topic import ENGINES
from topics.weights import WEIGHTS_STORED, WeightsPublished
from topics.wire import decode

_SHAPES = {8: Shape(192, 3, 3, 1, 768, 1_700, 64), 256: Shape(768, 6, 12, 4, 3072, 20_000, 64)}  # by MiB, float32
_CONTEXT = 64
_DEADLINE_S = 300.0
_WARM = 1  # rounds that are not counted


async def bench_weights(*, store: str, mib: int, engines: int, rounds: int, changed: float = 0.0) -> dict[str, float]:
    """Publish versions, one after the other, to idle engines.

    Args:
        store: "files" or "stream".
        mib: size of a version.
        engines: number of embedded engines, all on this host.
        rounds: number of versions, after one that is not counted; figures are medians.
        changed: share of the elements that differ between versions, which are then sent as differences; 0 for full
            versions in which all elements differ.

    Returns:
        Seconds of publication (until the version may be announced), of the load (from the announcement to the last
        engine's confirmation), and from the announcement to the last engine's first token. For "stream" also the MB/s
        at which one host reads a version, and at which eight hosts read it together, per second and per CPU second of
        the readers. Each reader is a process with a separate folder. For differences also their share of the bytes, the
        seconds of their encoding, and the seconds until the host had the result.

    Raises:
        BenchError: an actor failed, or an engine did not confirm a version in time.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        model = Path(scratch) / "model"
        tensors = write_random_model(model, _SHAPES[mib], context=_CONTEXT, dtype="float32")
        config = bench_config(
            "bench-weights",
            model={"path": str(model)},
            weights={"store": store},
            engine={"kind": "embedded", "count": engines, "max_running": 4},
            learner={},
        )
        async with Stage.open(config) as stage:
            for number in range(1, engines + 1):
                await stage.enter("engine", number)
            delivery = _Delivery(stage, model, tensors, changed)
            figures = await delivery.measure(rounds)
            return figures if store == "files" or changed else figures | await delivery.read(rounds)


class _Delivery:
    """The publication and loads of versions."""

    def __init__(self, stage: Stage, model: Path, tensors: list[HostTensor], changed: float) -> None:
        self._stage = stage
        self._model = model
        self._tensors = tensors
        self._changed = changed
        self._base = Base()
        self._figures: dict[str, list[float]] = {}
        place = StorePlace(stage.files.weights, ChunkLog(stage.bus, WEIGHTS_STORED))
        self._name = stage.config.weights.store
        self._store = store_kind(self._name).open(place)
        self._newest: WeightsPublished
        self._ready: dict[str, tuple[EngineReady, float]] = {}  # newest of each engine, and its time
        self._news = asyncio.Event()

    async def measure(self, rounds: int) -> dict[str, float]:
        """Return figures of this many versions."""
        reader = LogReader(
            self._stage.bus, ENGINES, self._on_ready, subjects=[ENGINE_READY.pattern(self._stage.bus.run)]
        )
        await reader.start()
        for version in range(rounds + _WARM + 1):
            self._change(version)
            if version == _WARM + 1:
                self._figures.clear()  # the first figures include the start of the engines
            began = time.monotonic()
            message = await asyncio.to_thread(self._write, version)
            published = time.monotonic()
            await publish(self._stage.bus, message, headers={WRITER: "bench"})
            loaded = await self._stage.until(self._all_have(message), _DEADLINE_S)
            sampled = await self._first_tokens()
            self._note(published_s=published - began, loaded_s=loaded - published, first_token_s=sampled - published)
            if self._changed:
                self._note(fetched_s=max(ready.fetch_s for ready, _ in self._ready.values()))
                await asyncio.to_thread(self._base.keep, message.key, {"model": self._tensors})
            report(f"version {version}: loaded {loaded - published:.3f} s after its announcement")
            self._newest = message
            FileStore(self._stage.files.weights).prune({Path(message.location).name}, (0, version))
            await purge_versions(self._stage.bus, (), (0, version))
        await reader.close()
        size = sum(tensor.content.nbytes for tensor in self._tensors)
        medians = {f"{self._name}_{name}": statistics.median(values) for name, values in self._figures.items()}
        return {"version_mib": size / 2**20, "engines": float(len(self._ready)), **medians}

    def _write(self, version: int) -> WeightsPublished:
        """Store a version: the first one in full."""
        files, store = {"model": self._tensors}, self._store
        if not (self._changed and self._base.key):
            return versions.publish(store, files, self._model, lineage=0, version=version)
        began = time.monotonic()
        delta, run = encode(self._base.files, files), self._stage.config.run
        size = sum(tensor.content.nbytes for tensor in self._tensors)
        self._note(encoded_s=time.monotonic() - began, share_of_bytes=delta.bytes / size)
        attempt = versions.new_attempt(0, version)
        share = versions.write_delta_share(store, attempt, delta)
        return versions.complete_delta(store, attempt, [share], run=run, base=self._base.key)

    def _note(self, **figures: float) -> None:
        for name, value in figures.items():
            self._figures.setdefault(name, []).append(value)

    async def read(self, rounds: int) -> dict[str, float]:
        """Return rates at which hosts read the newest version, one alone and eight at once."""
        figures = {}
        size = sum(tensor.content.nbytes for tensor in self._tensors)
        for name, readers in (("one_reader", 1), ("eight_readers", 8)):
            spans = [await self._stage.until(self._read(readers), _DEADLINE_S) for _ in range(rounds)]
            wall_s, cpu_s = (statistics.median(values) for values in zip(*spans, strict=True))
            figures[f"stream_{name}_mb_per_s"] = readers * size / 1e6 / wall_s
            figures[f"stream_{name}_mb_per_cpu_s"] = readers * size / 1e6 / cpu_s
        return figures

    async def _read(self, readers: int) -> tuple[float, float]:
        """Return the seconds in which all of this many processes have read a version, and their CPU seconds."""
        with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
            version = msgspec.json.encode(self._newest).decode()
            processes = []
            for number in range(readers):
                words = [sys.executable, "-m", "benchmarks.weights_reader"]
                words += [
                    str(self._stage.files.credentials / "engine.json"),
                    self._stage.config.run,
                    str(Path(scratch) / str(number)),
                    version,
                ]
                pipe = asyncio.subprocess.PIPE
                processes.append(await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe))
            outputs = [process.stdout for process in processes if process.stdout is not None]
            await asyncio.gather(*(output.readline() for output in outputs))  # they are connected
            began = time.monotonic()
            for process in processes:
                assert process.stdin is not None
                process.stdin.close()
            used = await asyncio.gather(*(output.readline() for output in outputs))
            ended = time.monotonic()
            await asyncio.gather(*(process.wait() for process in processes))
        return ended - began, sum(map(float, used))

    def _change(self, version: int) -> None:
        """Change all elements, or a share of them, as a step does."""
        factor, rng = np.float32(1.0 + 1e-4 * (version % 2 or -1)), np.random.default_rng(version)
        for tensor in self._tensors:
            values = tensor.content.view(np.float32)
            if self._changed:
                values[rng.integers(0, len(values), math.ceil(self._changed * len(values)))] *= factor
            else:
                values *= factor

    def _on_ready(self, record: Record) -> None:
        ready = decode(EngineReady, record.data)
        self._ready[ready.engine_id] = (ready, time.monotonic())
        self._news.set()

    async def _all_have(self, message: WeightsPublished) -> float:
        """Return when the last engine confirmed a version."""
        while True:
            done = [at for ready, at in self._ready.values() if ready.key == message.key]
            if len(done) == self._stage.config.engine.count:
                return max(done)
            self._news.clear()
            await self._news.wait()

    async def _first_tokens(self) -> float:
        """Return when every engine has sampled a token."""
        key = read_key(self._stage.files.engine_key_file(self._stage.config.engine, "engine-1"))
        clients = [EngineClient(ready.address, api_key=key) for ready, _ in self._ready.values()]
        await asyncio.gather(*(client.generate([1, 2, 3], SamplingParams(1)) for client in clients))
        ended = time.monotonic()
        await asyncio.gather(*(client.close() for client in clients))
        return ended
