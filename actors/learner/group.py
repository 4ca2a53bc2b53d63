"""Trainer groups by the name of their trainer: ranks as processes of their own, or a trainer in the learner itself."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from actors.learner.rank import Batch, Rank, StepResult, TrainerGroup
from actors.learner.rank_wire import BEAT, Call, Hello, Method, Reply, error_of
from actors.runtime.actor import ActorDown, Context
from asyncrl.framing import Frames, pack
from asyncrl.run.placement import Job, Placed
from asyncrl.training.checkpoint import Checkpoint
from topics.weights import WeightsPublished

T = TypeVar("T")

_START_S = 300.0  # for a rank to import what it needs and to connect
_SILENT_S = 60.0  # without a heartbeat a rank counts as dead
_END_S = 1.0  # from the end of a rank's connection to that of its process
_READ_BYTES = 1 << 18


class GroupLost(ActorDown):
    """A rank died or is silent, and with it the group."""


class RankProcesses:
    """See `TrainerGroup`: every rank is a process, and the first that dies ends all.

    A rank connects to a socket of the learner, and ends itself when that closes.
    """

    def __init__(self, context: Context, on_lost: Callable[[], None]) -> None:
        """
        Args:
            on_lost: called when a rank is gone, whether or not somebody waits for one.
        """
        self._context = context
        self._on_lost = on_lost
        self._count = context.config.learner.ranks
        self._numbers = itertools.count()
        self._placed: list[Placed] = []
        self._writers: dict[int, asyncio.StreamWriter] = {}  # by rank
        self._connected = asyncio.Event()  # all of them
        self._waiting: dict[tuple[int, int], asyncio.Future[bytes]] = {}  # by rank and number of the call
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost: GroupLost | None = None
        self._gone = asyncio.Event()  # it is lost
        self._closing = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """See `TrainerGroup.open`."""
        context = self._context
        folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-ranks-")))
        server = await asyncio.start_unix_server(self._accept, folder / "socket")
        self._closing.callback(server.close)
        for rank in range(self._count):
            words = (context.actor_id, str(rank), str(self._count), str(folder), "--run", context.bus.run)
            address = ("--address", context.bus.address.url)
            # The loopback: whatever this machine's own name resolves to, the ranks find one another.
            environment = {"GLOO_SOCKET_IFNAME": "lo"}
            job = Job(
                context.actor_id, "actors.learner.rank_process", (*words, *address), context.credentials, environment
            )
            placed = await context.placement.start(job)
            self._placed.append(placed)
            self._start(self._watch(rank, placed))
        await self._until_connected()
        await self._call("open")
        if self._count == 1:
            await self._closing.aclose()  # several ranks may look into their folder later

    async def load(self, checkpoint: Path) -> None:
        """See `TrainerGroup.load`."""
        await self._call("load", str(checkpoint))

    async def fetch(self, batch: Batch) -> None:
        """See `TrainerGroup.fetch`."""
        await self._call("fetch", batch.sequence)

    async def step(self, batch: Batch) -> StepResult:
        """See `TrainerGroup.step`."""
        results = await self._call("step", batch.sequence)
        return merged([msgspec.msgpack.decode(result, type=StepResult) for result in results])

    async def copy_weights(self) -> None:
        """See `TrainerGroup.copy_weights`."""
        await self._call("copy_weights")

    async def copy_state(self) -> None:
        """See `TrainerGroup.copy_state`."""
        await self._call("copy_state")

    async def digest(self) -> str:
        """See `TrainerGroup.digest`."""
        return await self._first(str, "digest")

    async def publish(self, *, lineage: int, version: int) -> WeightsPublished:
        """See `TrainerGroup.publish`."""
        return await self._first(WeightsPublished, "publish", lineage, version)

    async def save(self, checkpoint: Checkpoint) -> Path:
        """See `TrainerGroup.save`."""
        return Path(await self._first(str, "save", msgspec.to_builtins(checkpoint)))

    async def export(self, directory: Path) -> None:
        """See `TrainerGroup.export`."""
        await self._first(type(None), "export", str(directory))

    def check(self) -> None:
        """See `TrainerGroup.check`."""
        if self._lost is not None:
            raise self._lost

    async def close(self) -> None:
        """See `TrainerGroup.close`."""
        self._lose("the group is closed")
        placed, self._placed = self._placed, []
        for one in placed:
            one.kill()
        await asyncio.gather(*(one.wait() for one in placed))
        for task in self._tasks:
            task.cancel()
        for writer in self._writers.values():
            writer.close()
        await self._closing.aclose()

    async def _first(self, kind: type[T], method: Method, *values: Any) -> T:
        """Return the answer of the first rank."""
        [result] = await self._call(method, *values, ranks=(0,))
        return msgspec.msgpack.decode(result, type=kind)

    async def _call(self, method: Method, *values: Any, ranks: Sequence[int] | None = None) -> list[bytes]:
        """Let ranks do something, and return what each answers.

        Raises:
            GroupLost: a rank died or fell silent.
            AsyncRLError: what the first rank to fail reports.
        """
        self.check()
        number = next(self._numbers)
        ranks = range(self._count) if ranks is None else ranks
        loop = asyncio.get_running_loop()
        futures = [self._waiting.setdefault((rank, number), loop.create_future()) for rank in ranks]
        for rank in ranks:
            self._writers[rank].write(pack(Call(number, method, list(values))))
        try:
            # The first that fails ends the wait: the others may wait for it in vain.
            done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures]
        finally:
            for rank in ranks:
                self._waiting.pop((rank, number), None)

    async def _until_connected(self) -> None:
        try:
            async with asyncio.timeout(_START_S):
                await self._connected.wait()
        except TimeoutError:
            self._lose(f"{self._count - len(self._writers)} ranks did not connect within {_START_S:.0f} s")
        self.check()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read what a rank sends until it is gone or silent."""
        frames, rank = Frames(), -1
        with contextlib.suppress(OSError):
            while data := await self._read(reader):
                for frame in frames.feed(data):
                    if rank < 0:
                        rank = msgspec.msgpack.decode(frame, type=Hello).rank
                        self._writers[rank] = writer
                        if len(self._writers) == self._count:
                            self._connected.set()
                    elif frame != BEAT:
                        self._answered(rank, msgspec.msgpack.decode(frame, type=Reply))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._gone.wait()  # how its process ended says more
        self._lose(f"rank {rank} is silent")

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        """Return what comes next; nothing where nothing comes for long."""
        for _ in range(2):  # once more: it may have been this process that stood still
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SILENT_S):
                    return await reader.read(_READ_BYTES)
        return b""

    def _answered(self, rank: int, reply: Reply) -> None:
        future = self._waiting.get((rank, reply.number))
        if future is None or future.done():
            return
        if reply.error:
            future.set_exception(error_of(reply))
        else:
            future.set_result(bytes(reply.value))

    async def _watch(self, rank: int, placed: Placed) -> None:
        await placed.wait()
        self._lose(f"rank {rank} ended: {placed.end_text}")

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _lose(self, reason: str) -> None:
        """End whatever waits for the group."""
        if self._lost is not None:
            return
        self._lost = GroupLost(reason)
        self._gone.set()
        self._connected.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._lost)
        self._on_lost()


def merged(results: Sequence[StepResult]) -> StepResult:
    """Return the result of a step from those of its ranks, of which each had its own rows."""
    first = results[0]
    lags: dict[int, int] = {}
    for result in results:
        for lag, count in result.stats.lag_histogram.items():
            lags[lag] = lags.get(lag, 0) + count
    stats = dataclasses.replace(
        first.stats,
        tokens_trained=sum(result.stats.tokens_trained for result in results),
        tokens_stale=sum(result.stats.tokens_stale for result in results),
        lag_histogram=dict(sorted(lags.items())),
    )
    counts = [name for name in ("rows", "rows_skipped") if name in first.metrics]
    sums = {name: sum(result.metrics[name] for result in results) for name in counts}
    return StepResult(stats, first.metrics | sums)


def in_process(context: Context, _on_lost: Callable[[], None]) -> TrainerGroup:
    """Return a group of one rank in this process."""
    return Rank(context.bus, context.config, context.files)


MakeGroup: TypeAlias = Callable[[Context, Callable[[], None]], TrainerGroup]
GROUPS: dict[str, MakeGroup] = {"torch": RankProcesses, "scripted": in_process}
"""By `learner.trainer`. The scripted trainer computes nothing, so it needs no process of its own."""
