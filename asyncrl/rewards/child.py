"""A sandbox child: loads one reward function and answers calls over its pipes until they close."""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import os
import resource
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from asyncrl.errors import AsyncRLError, last_lines
from asyncrl.framing import READ_BYTES, Frames, first_frame, pack, take_pipes
from asyncrl.process import descendants, living_processes
from asyncrl.rewards.frames import Call, GradeRequest, Ready, Reply, RewardFailed, Setup, memory_text, read_score
from asyncrl.rewards.functions import FunctionError, is_async, load_function, load_rollout

_DETAIL_CHARS = 4000
_calls = msgspec.msgpack.Decoder(Call)


class Signature(msgspec.Struct):
    """The calling convention of a reward function."""

    keywords: list[str]
    positional: bool  # takes the completion in its place, not by name

    def call(self, function: Callable[..., Any], request: GradeRequest) -> Any:
        """Call `function` with the parts of `request` that it names."""
        keywords = {name: getattr(request, name) for name in self.keywords}
        return function(request.completion, **keywords) if self.positional else function(**keywords)


def read_signature(function: Callable[..., Any]) -> Signature:
    """Find out which parts of a request `function` names.

    Raises:
        FunctionError: when it needs an argument that a request does not have.
    """
    known = GradeRequest.__struct_fields__
    signature = Signature([], positional=False)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            signature.keywords += [name for name in known if name not in signature.keywords]
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.kind is parameter.POSITIONAL_ONLY and not signature.positional:
            signature.positional = True
        elif parameter.name in known and parameter.kind is not parameter.POSITIONAL_ONLY:
            signature.keywords.append(parameter.name)
        elif parameter.default is parameter.empty:
            near = difflib.get_close_matches(parameter.name, known, n=1)
            raise FunctionError(
                f"the reward function asks for {parameter.name!r}{f', did you mean {near[0]!r}' if near else ''}; "
                f"it may name {', '.join(known)} (or take the completion alone as its one positional-only argument)"
            )
    if signature.positional and "completion" in signature.keywords:
        signature.keywords.remove("completion")
    return signature


def _limit_memory(memory_mb: int) -> None:
    """Bound what this process, and each that it starts, may take: the data that it may write, not what it maps."""
    if memory_mb:
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]  # is -1 where there is no limit yet
        limit = min(memory_mb * 1_000_000, most if most >= 0 else sys.maxsize)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _send(outbox: BinaryIO, message: Ready | Reply) -> None:
    outbox.write(pack(message))
    outbox.flush()


def _failure(call_id: int, error: BaseException, *, memory_mb: int) -> Reply:
    if isinstance(error, RewardFailed):
        return Reply(call_id, reason=error.reason, detail=error.detail[:_DETAIL_CHARS])
    shown = last_lines(error, skip=2)
    if isinstance(error, MemoryError) and memory_mb:
        return Reply(call_id, reason="memory", detail=f"it needed more than {memory_text(memory_mb)}\n{shown}")
    return Reply(call_id, reason="raised", detail=shown)


def _has_descendants() -> bool:
    """Return whether any process that a call started lives: under this one, or orphaned under the supervisor."""
    return descendants(os.getppid(), living_processes()) != [os.getpid()]


def _read_calls(inbox: int, frames: Frames) -> Iterator[Call]:
    while data := os.read(inbox, READ_BYTES):
        for frame in frames.feed(data):
            yield _calls.decode(frame)


def _serve(function: Callable[[GradeRequest], Any], calls: Iterator[Call], outbox: BinaryIO, *, memory_mb: int) -> None:
    for call in calls:
        try:
            reply = Reply(call.id, *read_score(function(call.request)))
        except Exception as error:  # whatever the user's function raises is an answer
            reply = _failure(call.id, error, memory_mb=memory_mb)
        _send(outbox, reply)


async def _serve_async(
    function: Callable[[GradeRequest], Awaitable[Any]], inbox: int, outbox: BinaryIO, setup: Setup
) -> None:
    time_limit_s, frames, closed = setup.time_limit_s, Frames(), asyncio.Event()
    tasks = set[asyncio.Task[None]]()

    async def answer(call: Call) -> None:
        try:
            async with asyncio.timeout(time_limit_s) as limit:
                value = await function(call.request)
            reply = Reply(call.id, *read_score(value))
        except (Exception, asyncio.CancelledError) as error:  # whatever the user's function raises is an answer
            reply = _failure(call.id, error, memory_mb=setup.memory_mb)
            if isinstance(error, TimeoutError) and limit.expired():
                detail = f"no reward within {time_limit_s:g} s"
                reply = Reply(call.id, reason="time_limit", detail=detail, leftover=_has_descendants())
        _send(outbox, reply)

    def on_readable() -> None:
        data = os.read(inbox, READ_BYTES)
        if not data:
            closed.set()
        for frame in frames.feed(data):
            task = asyncio.get_running_loop().create_task(answer(_calls.decode(frame)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    asyncio.get_running_loop().add_reader(inbox, on_readable)
    await closed.wait()


def main() -> None:
    """Serve until the pipe is closed."""
    inbox, outbox = take_pipes()
    frames = Frames()
    setup = msgspec.msgpack.decode(first_frame(inbox, frames), type=Setup)
    _limit_memory(setup.memory_mb)
    try:
        if setup.rollout:
            load_rollout(setup.spec, base=Path(setup.base))
            _send(outbox, Ready(pid=os.getpid()))
            return
        function = load_function(setup.spec, base=Path(setup.base))
        if setup.arguments is not None:
            function = function(**setup.arguments)
        signature = read_signature(function)
    except (AsyncRLError, ValueError) as error:  # FunctionError, DataError, or a function without a readable signature
        memory = isinstance(error.__cause__, MemoryError) and setup.memory_mb
        _send(outbox, Ready(f"{error}\nit may take {memory_text(setup.memory_mb)}" if memory else str(error)))
        return
    concurrent = is_async(function)
    _send(outbox, Ready(concurrent=concurrent, pid=os.getpid()))
    call = functools.partial(signature.call, function)
    if concurrent:
        asyncio.run(_serve_async(call, inbox, outbox, setup))
    else:
        _serve(call, _read_calls(inbox, frames), outbox, memory_mb=setup.memory_mb)
