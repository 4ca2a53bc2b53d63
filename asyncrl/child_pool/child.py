"""A child process: makes one service and answers calls over its pipes until they close."""

from __future__ import annotations

import asyncio
import importlib
import os
import resource
import sys
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from asyncrl.background import BackgroundTasks
from asyncrl.child_pool.frames import Call, CallFailed, Ready, Reply, Service, Setup
from asyncrl.errors import AsyncRLError, last_lines
from asyncrl.framing import READ_BYTES, Frames, pack
from asyncrl.process import descendants, living_processes

_DETAIL_CHARS = 4000
_calls = msgspec.msgpack.Decoder(Call)


def main() -> None:
    """Serve until the pipe is closed."""
    inbox, outbox = _take_pipes()
    frames = Frames()
    incoming = _incoming(inbox, frames)
    first = next(incoming, None)  # nothing follows before our answer
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    _limit_memory(setup.memory_mb)
    module, _, name = setup.service.partition(":")
    try:
        service = getattr(importlib.import_module(module), name)(**setup.arguments)
    except (AsyncRLError, ValueError) as error:  # or a function without a readable signature
        memory = isinstance(error.__cause__, MemoryError) and setup.memory_mb
        _send(outbox, Ready(f"{error}\nit may take {setup.memory_text}" if memory else str(error)))
        return
    _send(outbox, Ready(concurrent=service.concurrent, pid=os.getpid(), about=service.about))
    if service.concurrent:
        asyncio.run(_serve_async(service, inbox, outbox, setup))
        return
    for frame in incoming:
        call = _calls.decode(frame)
        try:
            reply = Reply(call.id, service.finish(service.call(call.request)))
        except Exception as error:  # any exception of the user's function is an answer
            reply = _failure(call.id, error, setup)
        _send(outbox, reply)


async def _serve_async(service: Service, inbox: int, outbox: BinaryIO, setup: Setup) -> None:
    frames, closed, tasks = Frames(), asyncio.Event(), BackgroundTasks()

    async def answer(call: Call) -> None:
        try:
            async with asyncio.timeout(setup.time_limit_s) as limit:
                value = await service.call(call.request)
            reply = Reply(call.id, service.finish(value))
        except (Exception, asyncio.CancelledError) as error:  # any exception of the user's function is an answer
            reply = _failure(call.id, error, setup)
            if isinstance(error, TimeoutError) and limit.expired():
                detail = f"no answer within {setup.time_limit_s:g} s"
                reply = Reply(call.id, reason="time_limit", detail=detail, leftover=_has_descendants())
        _send(outbox, reply)

    def on_readable() -> None:
        data = os.read(inbox, READ_BYTES)
        if not data:
            closed.set()
        for frame in frames.feed(data):
            tasks.start(answer(_calls.decode(frame)))

    asyncio.get_running_loop().add_reader(inbox, on_readable)
    await closed.wait()


def _incoming(inbox: int, frames: Frames) -> Iterator[bytes]:
    while data := os.read(inbox, READ_BYTES):
        yield from frames.feed(data)


def _send(outbox: BinaryIO, message: Ready | Reply) -> None:
    outbox.write(pack(message))
    outbox.flush()


def _failure(call_id: int, error: BaseException, setup: Setup) -> Reply:
    if isinstance(error, CallFailed):
        return Reply(call_id, reason=error.reason, detail=error.detail[:_DETAIL_CHARS])
    shown = last_lines(error, skip=2)
    if isinstance(error, MemoryError) and setup.memory_mb:
        return Reply(call_id, reason="memory", detail=f"it needed more than {setup.memory_text}\n{shown}")
    return Reply(call_id, reason="raised", detail=shown)


def _has_descendants() -> bool:
    """Return whether any process that a call started lives: under this one, or orphaned under the supervisor."""
    return descendants(os.getppid(), living_processes()) != [os.getpid()]


def _limit_memory(memory_mb: int) -> None:
    """Limit this process and its children: the data that they may write, not mapped memory."""
    if memory_mb:
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]  # is -1 without a limit
        limit = min(memory_mb * 1_000_000, most if most >= 0 else sys.maxsize)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _take_pipes() -> tuple[int, BinaryIO]:
    """Keep the pipes for ourselves: a function reads an empty stdin, and its prints go to stderr."""
    inbox, outbox = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return inbox, os.fdopen(outbox, "wb", closefd=False)  # open until the process ends, however long that takes it
