"""Entry of a rank: `python -m actors.learner.rank_process ACTOR_ID RANK RANKS FOLDER --run RUN --credentials FILE`.

FOLDER holds the socket of the learner, and the file by which the ranks find one another.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until all is imported: passes of the collector over what imports make are a fifth of their time

import argparse
import asyncio
import contextlib
import faulthandler
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import uvloop

from asyncrl.imports import absent

with absent("accelerate"):  # which transformers would import to place models, and a rank places its model itself
    import asyncrl.training.torch.trainer  # noqa: F401 - for `Rank.open_trainer`: loaded before anyone waits for beats
from actors.learner.rank import Rank
from actors.learner.rank_wire import BEAT_S, ERRORS, NO_GPU, Call, Reply, encoded
from actors.runtime.actor import Context, Login, open_context
from actors.runtime.cpu_priority import leave_cores, set_nice
from asyncrl.background import BackgroundTasks
from asyncrl.crash import set_role
from asyncrl.framing import pack, read_frames, write_heartbeats
from asyncrl.process import STACK_SIGNAL
from asyncrl.telemetry.logs import open_log
from asyncrl.telemetry.output import print_lossy
from asyncrl.training.ranks import NoGpu


class RankServer:
    """Answers the calls of the learner."""

    def __init__(self, context: Context, rank: Rank, number: int, writer: asyncio.StreamWriter) -> None:
        self._context = context
        self._rank = rank
        self._number = number
        self._writer = writer
        self._turn = asyncio.Lock()
        self._tasks = BackgroundTasks(self._on_fault)

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Answer until the learner closes the socket, or a call ends this process."""
        self._tasks.start(write_heartbeats(self._writer, pack(Reply(self._number)), BEAT_S))
        async for frame in read_frames(reader):
            self._tasks.start(self._answer(msgspec.msgpack.decode(frame, type=Call)))

    def _on_fault(self, error: BaseException) -> None:
        if isinstance(error, NoGpu):
            self._context.log.error("no GPU", reason=str(error))
            os._exit(NO_GPU)
        self._context.log.error("rank crashed", reason=f"{type(error).__name__}: {error}", exc_info=error)
        os._exit(1)  # threads may wait for other ranks for ever

    async def _answer(self, call: Call) -> None:
        async with contextlib.nullcontext() if call.is_independent else self._turn:
            try:
                value = encoded(await self._rank.call(call.method, *call.given()))
                reply = Reply(self._number, call.number, value)
            except tuple(ERRORS.values()) as error:
                name = next(name for name, kind in ERRORS.items() if isinstance(error, kind))
                reply = Reply(self._number, call.number, error=name, reason=str(error))
        self._writer.write(pack(reply))


async def run(login: Login, rank: int, ranks: int, folder: Path) -> None:
    """Connect to the run and to the learner, and answer until the learner is gone."""
    set_role(login.role)
    context = await open_context(login, open_log(actor=login.actor_id))
    set_nice(context.config, login.actor_id)  # more than the learner, which has started it
    if context.config.gateway.count and context.config.gateway.idle == "ranks":  # all but its heartbeat
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(initializer=leave_cores))
    reader, writer = await asyncio.open_unix_connection(folder / "socket")
    worker = Rank(context.bus, context.config, context.files, rank=rank, ranks=ranks, rendezvous=folder / "ranks")
    await RankServer(context, worker, rank, writer).serve(reader)
    os._exit(0)  # a thread may still compute


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m actors.learner.rank_process", description="A rank of a learner.")
    parser.add_argument("actor_id")
    parser.add_argument("rank", type=int)
    parser.add_argument("ranks", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", required=True)
    parser.add_argument("--credentials", type=Path, required=True)
    parser.add_argument("--address", default="")
    given = parser.parse_args()
    print_lossy()
    faulthandler.register(STACK_SIGNAL)
    gc.freeze()  # imported objects live until the process ends
    gc.enable()
    login = Login("learner", f"{given.actor_id}-rank{given.rank}", given.run, given.credentials, given.address)
    uvloop.run(run(login, given.rank, given.ranks, given.folder))


if __name__ == "__main__":
    main()
