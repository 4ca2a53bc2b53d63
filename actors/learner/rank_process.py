"""Entry of a rank: `python -m actors.learner.rank_process ACTOR_ID RANK RANKS FOLDER --run RUN --credentials FILE`.

FOLDER holds the socket of the learner, and the file by which the ranks find one another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from actors.learner.rank import Batch, Rank, read_batch
from actors.learner.rank_wire import BEAT, BEAT_S, BESIDE, ERRORS, Call, Hello, Reply
from actors.runtime.actor import Context, Login, open_context
from asyncrl.crash import set_role
from asyncrl.framing import Frames, pack
from asyncrl.telemetry.logs import open_log
from asyncrl.training.checkpoint import Checkpoint

_READ_BYTES = 1 << 18
_KEPT = 2  # batches: the one that is trained, and the next


class RankServer:
    """Answers the calls of the learner."""

    def __init__(self, context: Context, rank: Rank, writer: asyncio.StreamWriter) -> None:
        self._context = context
        self._rank = rank
        self._writer = writer
        self._turn = asyncio.Lock()
        self._batches: dict[int, asyncio.Task[Batch]] = {}  # by sequence
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Answer until the learner closes the socket, or a call ends this process."""
        self._start(self._beat())
        frames = Frames()
        while data := await reader.read(_READ_BYTES):
            for frame in frames.feed(data):
                self._start(self._answer(msgspec.msgpack.decode(frame, type=Call)))

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._context.log.error("rank crashed", reason=f"{type(error).__name__}: {error}", exc_info=error)
            os._exit(1)  # threads may wait for other ranks for ever

    async def _answer(self, call: Call) -> None:
        async with contextlib.nullcontext() if call.method in BESIDE else self._turn:
            try:
                value = await self._do(call)
                reply = Reply(call.number, msgspec.Raw(msgspec.msgpack.encode(value)))
            except tuple(ERRORS.values()) as error:
                name = next(name for name, kind in ERRORS.items() if isinstance(error, kind))
                reply = Reply(call.number, error=name, reason=str(error))
        self._writer.write(pack(reply))

    async def _do(self, call: Call) -> Any:
        rank, values = self._rank, call.values
        if call.method == "fetch":
            return await rank.fetch(await self._batch(*values))
        if call.method == "step":
            return await rank.step(await self._batch(*values))
        if call.method == "load":
            return await rank.load(Path(*values))
        if call.method == "publish":
            return await rank.publish(lineage=values[0], version=values[1])
        if call.method == "save":
            return str(await rank.save(msgspec.convert(values[0], Checkpoint)))
        if call.method == "export":
            return await rank.export(Path(*values))
        return await getattr(rank, call.method)()  # the others have no arguments

    async def _batch(self, sequence: int) -> Batch:
        """A batch by its reference; the newest ones are kept."""
        if sequence not in self._batches:
            self._batches[sequence] = asyncio.create_task(read_batch(self._context.bus, sequence))
            for old in list(self._batches)[:-_KEPT]:
                del self._batches[old]
        return await self._batches[sequence]

    async def _beat(self) -> None:
        beat = len(BEAT).to_bytes(4, "little") + BEAT
        while True:
            self._writer.write(beat)
            await self._writer.drain()
            await asyncio.sleep(BEAT_S)


async def run(login: Login, rank: int, ranks: int, folder: Path) -> None:
    """Connect to the run and to the learner, and answer until the learner is gone."""
    set_role(login.role)
    context = await open_context(login, open_log(actor=login.actor_id))
    reader, writer = await asyncio.open_unix_connection(folder / "socket")
    writer.write(pack(Hello(rank)))
    worker = Rank(context.bus, context.config, context.files, rank=rank, ranks=ranks, rendezvous=folder / "ranks")
    with contextlib.suppress(ConnectionError):
        await RankServer(context, worker, writer).serve(reader)
    os._exit(0)  # a thread may still compute


def main() -> None:
    """Parse the arguments and run."""
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m actors.learner.rank_process", description="A rank of a learner.")
    parser.add_argument("actor_id")
    parser.add_argument("rank", type=int)
    parser.add_argument("ranks", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", required=True)
    parser.add_argument("--credentials", type=Path, required=True)
    parser.add_argument("--address", default="")
    given = parser.parse_args()
    login = Login("learner", f"{given.actor_id}-rank{given.rank}", given.run, given.credentials, given.address)
    uvloop.run(run(login, given.rank, given.ranks, given.folder))


if __name__ == "__main__":
    main()
