"""Runs a service in child processes that are killed at their time limit and replaced.

A child takes one call at a time (a function) or many (an async function); further calls wait in its pipe so that it
never idles. A call that hangs, or ends its process, fails alone: later calls go to another child. Where an async
function ran many calls when its process ended, the culprit is unknown, so they run again one at a time.

Each child has a supervisor, the process that is started here. It ends with the child, after all processes that the
child started: then no part of the function still runs.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from asyncrl.child_pool.frames import Call, CallFailed, Ready, Reply, Setup
from asyncrl.child_pool.link import Link
from asyncrl.errors import UNREADABLE, FunctionError
from asyncrl.framing import FrameError, Frames, pack
from asyncrl.process import log_tail

_PIPELINED_CALLS = 8  # given to a child at once: enough to hide a round trip, few enough to share work evenly
_CONCURRENT_CALLS = 64  # of an async function in one child
_CANCEL_S = 0.5  # for an async function to end after its child cancelled it
_DRAIN_S = 1.0  # from the end of a child to that of its pipe, or the other way round
_READ_BYTES = 1 << 18
_STOOD_S = 1.0  # a timer that fires this late shows that this process was stopped: no call had its full time

_replies = msgspec.msgpack.Decoder(Reply)
log = structlog.get_logger()


class LoadEnded(FunctionError):
    """A function's file ended its process while it was loaded."""


class LoadLate(FunctionError):
    """A function's file, or its setup, took too long."""


class _Job:
    """A pending call."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.alone = False  # shares no child: it may have ended one
        self.began_s = 0.0  # loop time at which its turn began


class _Child:
    """One child process and the jobs given to it, in order."""

    def __init__(self, link: Link, ready: Ready, frames: Frames, setup: Setup) -> None:
        self.link = link
        self.ready = ready
        self.jobs: dict[int, _Job] = {}
        self.fault: Reply | None = None  # why it is ended; the call that runs fails with it
        self.retiring = False  # takes no further call, and ends after its running ones
        self._frames = frames
        self._setup = setup
        self._limit_s = setup.time_limit_s + (_CANCEL_S if ready.concurrent else 0.0)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0  # loop time of the timer
        self._given = 0
        self._ending: asyncio.Task[None] | None = None

    @property
    def running(self) -> list[_Job]:
        """Return the jobs whose turn has begun; the first of them began first."""
        jobs = list(self.jobs.values())
        return jobs if self.ready.concurrent else jobs[:1]

    @property
    def calls_at_once(self) -> int:
        """Calls that it is given before others have ended."""
        return _CONCURRENT_CALLS if self.ready.concurrent else _PIPELINED_CALLS

    def has_room(self, job: _Job) -> bool:
        if self.retiring or self.link.calls.is_closing():  # the latter: it has ended; uvloop refuses to write to it
            return False
        if len(self.jobs) >= self.calls_at_once:
            return False
        return not self.jobs or not (job.alone or any(other.alone for other in self.jobs.values()))

    def give(self, job: _Job) -> None:
        if self.ready.concurrent or not self.jobs:
            job.began_s = self._loop.time()
        self._given += 1
        self.jobs[self._given] = job
        self.link.calls.write(pack(Call(self._given, job.request)))
        if self._timer is None:
            self._due_s = self._loop.time()
            self._watch()

    async def serve(self, settled: Callable[[], None]) -> None:
        """Settle calls by the replies that come, until the child and all it started have ended.

        A child may close its pipe and continue; and the pipe may stay open after its end, if its supervisor was killed.

        Args:
            settled: called after each.
        """
        reading, exit_ = asyncio.create_task(self._read(settled)), asyncio.create_task(self.link.process.wait())
        try:
            await asyncio.wait({reading, exit_}, return_when=asyncio.FIRST_COMPLETED)
            if exit_.done() and self._timer:
                self._timer.cancel()
            if not self.retiring:
                await asyncio.wait({reading, exit_}, timeout=_DRAIN_S)
        finally:
            reading.cancel()
            exit_.cancel()
        await self.end()

    async def _read(self, settled: Callable[[], None]) -> None:
        try:
            while not (self.retiring and not self.jobs) and (data := await self.link.replies.read(_READ_BYTES)):
                for frame in self._frames.feed(data):
                    self._settle(_replies.decode(frame))
                    settled()
        except (FrameError, LookupError, *UNREADABLE) as error:
            detail = f"the function's process wrote into the pipe of its answers, and was killed: {error}"
            self.fault, self.retiring = Reply(0, reason="exited", detail=detail), True

    def _settle(self, reply: Reply) -> None:
        job = self.jobs.pop(reply.id)
        if not self.ready.concurrent and self.jobs:
            next(iter(self.jobs.values())).began_s = self._loop.time()
        self.retiring |= reply.leftover
        _settle(job, reply)

    async def end(self) -> None:
        """Kill it, again and again until it has gone."""
        self.retiring = True
        if self._timer:
            self._timer.cancel()
        if self._ending is None:
            self._ending = asyncio.create_task(self.link.end(self.ready.pid))
        await asyncio.shield(self._ending)

    def _watch(self) -> None:
        """Kill the process when the first job runs past its limit; set again only when it fires, not at every job."""
        self._timer = None
        if not self.jobs:
            return
        now = self._loop.time()
        if now - self._due_s > _STOOD_S:
            for job in self.running:
                job.began_s += now - self._due_s
        self._due_s = next(iter(self.jobs.values())).began_s + self._limit_s
        if self._due_s > now:
            self._timer = self._loop.call_at(self._due_s, self._watch)
        else:
            self.retiring = True
            detail = f"no answer within {self._setup.time_limit_s:g} s; the function's process was killed"
            self.fault = Reply(0, reason="time_limit", detail=detail)
            self._ending = asyncio.create_task(self.link.end(self.ready.pid))


class ChildPool:
    """A service in `workers` child processes."""

    def __init__(self, setup: Setup, children: list[_Child]) -> None:
        self._setup = setup
        self.at_once = sum(child.calls_at_once for child in children)
        self.about = children[0].ready.about
        self._children: list[_Child] = []
        self._queue: deque[_Job] = deque()
        self._wanted = asyncio.Event()
        self._keepers = [asyncio.create_task(self._keep(child)) for child in children]

    @classmethod
    async def open(cls, setup: Setup, *, workers: int) -> ChildPool:
        """Start the children and make the service in each.

        Raises:
            LoadEnded: a child ended.
            FunctionError: the service cannot be made.
        """
        starts = [asyncio.create_task(_start(setup)) for _ in range(workers)]
        done = await asyncio.gather(*starts, return_exceptions=True)
        children = [child for child in done if isinstance(child, _Child)]
        for error in done:
            if isinstance(error, BaseException):
                await asyncio.gather(*(child.end() for child in children))
                raise error
        return cls(setup, children)

    async def call(self, request: Any) -> Any:
        """Have a request served, and return its result.

        Raises:
            CallFailed: it raised, ran past its limit, or ended its process.
        """
        if not self._keepers:
            raise CallFailed("closed", "the child pool is closed")
        job = _Job(request)
        self._queue.append(job)
        self._wanted.set()
        self._dispatch()
        reply = await job.reply
        if reply.reason is not None:
            raise CallFailed(reply.reason, reply.detail)
        return reply.value

    async def close(self) -> None:
        """Kill the children; running calls fail with reason `closed`."""
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        jobs = [*self._queue, *(job for child in self._children for job in child.jobs.values())]
        await asyncio.gather(*(child.end() for child in self._children))
        for job in jobs:
            _settle(job, Reply(0, reason="closed", detail="the child pool was closed"))

    def _dispatch(self) -> None:
        while self._queue:
            job = self._queue[0]
            if not job.reply.done():  # its caller may have gone
                free = [child for child in self._children if child.has_room(job)]
                if not free:
                    return
                min(free, key=lambda child: len(child.jobs)).give(job)
            self._queue.popleft()

    async def _keep(self, child: _Child | None) -> None:
        """Serve one place of the pool: when its child ends, another takes over."""
        while True:
            if child is not None:
                self._children.append(child)
                self._dispatch()
                await child.serve(self._dispatch)
                self._children.remove(child)
                self._discard(child)
            if child is None or not (child.jobs or self._queue):
                # Does not load any more, or ended while idle: no further try before there is new work.
                self._wanted.clear()
                await self._wanted.wait()
            try:
                child = await _start(self._setup)
            except (FunctionError, OSError) as error:
                log.error("child process not replaced", function=self._setup.spec, error=str(error))
                child = None
                self._give_up(error)

    def _discard(self, child: _Child) -> None:
        """Fail the call that ended its process, and give back those that did not."""
        how = child.link.exit_text(self._setup, ended=child.fault is not None)
        running = child.running
        reply = child.fault or Reply(0, reason="exited", detail=f"the function's process ended: {how}")
        log.warning("child process ended", function=self._setup.spec, exit=how, fault=reply.reason)
        if len(running) == 1:
            _settle(running[0], reply)
        else:
            for job in running:
                job.alone = True
        self._queue.extendleft(reversed([job for job in child.jobs.values() if not job.reply.done()]))
        self._dispatch()

    def _give_up(self, error: Exception) -> None:
        if not self._children:
            for job in self._queue:
                _settle(job, Reply(0, reason="exited", detail=f"the function's process does not start again: {error}"))
            self._queue.clear()


def _settle(job: _Job, reply: Reply) -> None:
    if not job.reply.done():  # its caller may have gone
        job.reply.set_result(reply)


async def load_problems(setups: Iterable[Setup]) -> list[str]:
    """Return for each function the reason why it cannot be loaded, or ""."""
    return await asyncio.gather(*map(_load_problem, setups))


async def _load_problem(setup: Setup) -> str:
    """The reason with the function's output, if it ends its process."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        with output.open("wb") as stderr:
            try:
                child = await _start(setup, stderr.fileno())
            except LoadEnded as error:
                return f"{error}: {log_tail(output)}"
            except FunctionError as error:
                return str(error)
            await child.end()
    return ""


async def _start(setup: Setup, stderr: int | None = None) -> _Child:
    """Start a child and wait until it has made its service.

    Args:
        stderr: destination of its output; None for this process's own stderr, or dropped if it is silent.
    """
    if stderr is None and setup.silent:
        stderr = asyncio.subprocess.DEVNULL
    opening = asyncio.create_task(Link.open(setup.time_limit_s, stderr))
    try:
        link = await asyncio.shield(opening)
    except asyncio.CancelledError:
        await (await opening).end()
        raise
    child: _Child | None = None
    try:
        link.calls.write(pack(setup))
        frames = Frames(setup.reply_bytes)
        async with asyncio.timeout(setup.load_limit_s):
            while data := await link.replies.read(_READ_BYTES):
                for frame in frames.feed(data):
                    ready = msgspec.msgpack.decode(frame, type=Ready)
                    if ready.error:
                        raise FunctionError(ready.error)
                    child = _Child(link, ready, frames, setup)
                    return child
            await link.process.wait()
            raise LoadEnded(f"{setup.spec}: its process ended at loading: {link.exit_text(setup)}")
    except (FrameError, *UNREADABLE) as error:
        raise FunctionError(
            f"{setup.spec}: its process wrote into the pipe of its answers at loading: {error}"
        ) from error
    except TimeoutError as error:
        raise LoadLate(f"{setup.spec}: not loaded within {setup.load_limit_s:g} s") from error
    finally:
        if child is None:
            await link.end()
