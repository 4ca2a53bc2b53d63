"""Trainer groups: one process per rank, or a trainer in the learner itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec

from actors.learner.rank import Rank
from actors.learner.rank_wire import ERRORS, NO_GPU, Call, Reply, encoded
from actors.runtime.actor import ActorDown, Context
from asyncrl.background import BackgroundTasks, first_of, unless
from asyncrl.config.trainers import TrainerCapability, trainer_kind
from asyncrl.errors import AsyncRLError
from asyncrl.framing import pack, read_frames
from asyncrl.host import VISIBLE_GPUS
from asyncrl.run.placement import Job, NoRoom, Placed

_Key: TypeAlias = tuple[int, int | None]

_SILENCES = 3  # times supervision.silence_s, twice: a rank may be silent so long, as imports stop its heartbeat
# Calls come from several threads. With an arena for each, glibc would keep the freed activations once per thread.
_ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
_END_S = 1.0  # from the end of a rank's connection to that of its process


class GroupLost(ActorDown):
    """A rank died or is silent, and with it the group."""

    def __init__(self, reason: str, rank: int | None = None) -> None:
        super().__init__(reason)
        self.rank = rank  # the rank whose GPU is missing, if that is the reason


class Stopping(AsyncRLError):
    """The learner shall stop before it has the GPU, or its trainer group."""


class TrainerGroup(Protocol):
    """The trainer of a learner: one or several ranks, which live and die as one."""

    async def open(self) -> None:
        """Start, with the model as it was before the run.

        Raises:
            Stopping: the learner is asked to stop meanwhile.
        """

    async def ask(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a method of every rank, its publisher or its trainer; returns the answers.

        Raises:
            GroupLost: a rank died or fell silent.
            AsyncRLError: what the method names, of the first rank that fails.
        """

    async def ask_first(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the first rank alone; as `ask`."""

    def check(self) -> None:
        """Raise what ended the group, if anything did."""

    @property
    def can_grow(self) -> bool:
        """Return whether missing GPUs have returned: a group that is opened again has more ranks."""

    async def close(self) -> None:
        """End all ranks; the group cannot be opened again."""


class RankProcesses:
    """See `TrainerGroup`: every rank is a process, and the first that dies ends all.

    A rank connects to a socket of the learner, and ends itself when that closes.
    """

    can_grow = False

    def __init__(self, context: Context, on_lost: Callable[[], None], gpus: Sequence[int] | None = None) -> None:
        self._context = context
        self._on_lost = on_lost  # called when a rank is gone, whether or not a call waits for one
        learner = context.config.learner
        self._gpus = gpus or range(learner.ranks)  # their numbers
        self._count = len(self._gpus)
        self._environment = only(context, self._gpus) if self._count < learner.ranks else {}
        self._silence_s = _SILENCES * context.config.supervision.silence_s
        self._numbers = itertools.count()
        self._placed: list[Placed] = []
        self._writers: dict[int, asyncio.StreamWriter] = {}  # by rank
        self._connected = asyncio.Event()  # all of them
        self._waiting: dict[_Key, asyncio.Future[bytes]] = {}  # by rank and number of the call
        self._tasks = BackgroundTasks()
        self._lost: GroupLost | None = None
        self._gone = asyncio.Event()  # it is lost
        self._closing = contextlib.AsyncExitStack()

    async def open(self) -> None:
        await unless(self._context.stop, self._open())
        if self._context.stop.is_set():
            raise Stopping("the learner shall stop before its trainer group is open")

    async def _open(self) -> None:
        context = self._context
        folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-ranks-")))
        server = await asyncio.start_unix_server(self._accept, folder / "socket")
        self._closing.callback(server.close)
        for rank in range(self._count):
            words = (context.actor_id, str(rank), str(self._count), str(folder), "--run", context.bus.run)
            address = ("--address", context.bus.address.url)
            # The loopback: ranks find one another even if this machine's name resolves to another address.
            environment = {"GLOO_SOCKET_IFNAME": "lo", **_ONE_ARENA, **self._environment}
            job = Job(
                context.actor_id, "actors.learner.rank_process", (*words, *address), context.credentials, environment
            )
            try:
                placed = await context.placement.start(job)
            except NoRoom as error:
                self._lose(f"rank {rank} has no room: {error}", rank)
                self.check()
            self._placed.append(placed)
            self._tasks.start(self._watch(rank, placed))
        await self._until_connected()
        await self._take_cards()
        await self.ask(Rank.open_trainer)
        if self._count == 1:
            await self._closing.aclose()  # several ranks may look into their folder later

    async def ask(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return await self._ask(range(self._count), method, arguments)

    async def ask_first(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return (await self._ask(range(1), method, arguments))[0]

    async def _ask(self, ranks: Sequence[int], method: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        self.check()
        number, loop = next(self._numbers), asyncio.get_running_loop()
        futures: dict[_Key, asyncio.Future[bytes]] = {(rank, number): loop.create_future() for rank in ranks}
        self._waiting.update(futures)
        call = Call(number, method.__qualname__, [encoded(argument) for argument in arguments])
        frame = pack(call)
        for rank in ranks:
            self._writers[rank].write(frame)
        try:
            if call.is_independent:
                await asyncio.wait(futures.values())
            # Of others the first that fails ends the wait: the rest may wait for it in vain.
            values = await asyncio.gather(*futures.values())
        finally:
            for key in futures:
                del self._waiting[key]
        return [call.answer(value) for value in values]

    def check(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def close(self) -> None:
        self._lose("the group is closed")
        placed, self._placed = self._placed, []
        for one in placed:
            one.kill()
        await asyncio.gather(*(one.wait() for one in placed))
        self._tasks.cancel()
        for writer in self._writers.values():
            writer.close()
        await self._closing.aclose()

    async def _until_connected(self) -> None:
        try:
            async with asyncio.timeout(self._context.config.learner.start_s):
                await self._connected.wait()
        except TimeoutError:
            missing = sorted(set(range(self._count)) - self._writers.keys())
            self._lose(self._late(f"ranks {missing} did not connect"))
        self.check()

    async def _take_cards(self) -> None:
        """Let each rank use its GPU: one whose driver hangs beats on, and would have all others wait."""
        late = asyncio.get_running_loop().call_later(self._context.config.learner.start_s, self._hung)
        try:
            await self.ask(Rank.take_gpu)
        finally:
            late.cancel()

    def _hung(self) -> None:
        missing = sorted(rank for (rank, _), answer in self._waiting.items() if not answer.done())
        self._lose(self._late(f"ranks {missing} did not take their GPUs"), missing[0])

    def _late(self, what: str) -> str:
        logs = f"see `asyncrl logs {self._context.actor_id}`, or raise learner.start_s on a slow machine"
        return f"{what} within learner.start_s = {self._context.config.learner.start_s:g} s; {logs}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read what a rank sends until it is gone or silent."""
        rank = -1
        async for frame in read_frames(reader, self._silence_s):
            reply = msgspec.msgpack.decode(frame, type=Reply)
            if rank < 0:
                rank = reply.rank
                self._writers[rank] = writer
                if len(self._writers) == self._count:
                    self._connected.set()
            future = self._waiting.get((rank, reply.number))
            if future is not None and not future.done():
                if reply.error:
                    future.set_exception(ERRORS[reply.error](reply.reason))
                else:
                    future.set_result(bytes(reply.value))
        await first_of(self._gone.wait(), timeout_s=_END_S)  # the end of its process explains more
        self._lose(f"rank {rank} is silent")

    async def _watch(self, rank: int, placed: Placed) -> None:
        await placed.wait()
        self._lose(f"rank {rank} ended: {placed.end_text}", rank if placed.returncode == NO_GPU else None)

    def _lose(self, reason: str, rank: int | None = None) -> None:
        """End every call that waits for the group."""
        if self._lost is not None:
            return
        self._lost = GroupLost(reason, rank)
        self._gone.set()
        self._connected.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._lost)
        self._on_lost()


def only(context: Context, gpus: Sequence[int]) -> dict[str, str]:
    """Environment of processes that see these GPUs alone; a rank takes the one of its number among them."""
    if context.config.learner.device != "cuda":
        return {}
    seen = os.environ.get(VISIBLE_GPUS)
    names = seen.split(",") if seen else []
    return {VISIBLE_GPUS: ",".join(names[gpu] if gpu < len(names) else str(gpu) for gpu in gpus)}


def in_process(context: Context, _on_lost: Callable[[], None]) -> TrainerGroup:
    """Return a group of one rank in this process."""
    return Rank(context.bus, context.config, context.files)


def new_group(context: Context, on_lost: Callable[[], None]) -> TrainerGroup:
    """Return a group of the trainer that the config names."""
    kind = trainer_kind(context.config.learner.trainer)
    return (RankProcesses if kind.can(TrainerCapability.PROCESSES) else in_process)(context, on_lost)
