"""Runs a reward function in child processes that are killed at their time limit and replaced.

A child takes one call at a time (a function) or many (an async function); further calls wait in its pipe so that it
never idles. A call that hangs, or ends its process, fails alone: calls behind it go to another child. Where an async
function ran many calls when its process ended, nothing tells which one it was, so they run again one at a time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator

import msgspec
import structlog

from asyncrl.processes import python
from asyncrl.tasks.frames import Call, Frames, GradeRequest, Ready, Reply, RewardFailed, Setup, pack
from asyncrl.tasks.functions import FunctionError

_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from asyncrl.tasks.child import main; main(int(sys.argv[1]))"
_LOAD_LIMIT_S = 300.0
_PIPELINED_CALLS = 8  # given to a child at once: enough to hide a round trip, few enough to share work evenly
_CONCURRENT_CALLS = 64  # of an async function in one child
_CANCEL_S = 0.5  # that an async function has to end after its child cancelled it
_READ_BYTES = 1 << 18

_replies = msgspec.msgpack.Decoder(Reply)
log = structlog.get_logger()


class _Job:
    """A call that somebody waits for."""

    def __init__(self, request: GradeRequest) -> None:
        self.request = request
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.alone = False  # shares no child: it may have ended one
        self.began_s = 0.0  # loop time at which its turn began


class _Child:
    """One child process and the jobs given to it, in order."""

    def __init__(self, process: Process, ready: Ready, frames: Frames, setup: Setup) -> None:
        self.process = process
        self.ready = ready
        self.jobs: dict[int, _Job] = {}
        self.overdue = False
        self._frames = frames
        self._limit_s = setup.time_limit_s + (_CANCEL_S if ready.concurrent else 0.0)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._given = 0

    @property
    def running(self) -> list[_Job]:
        """Jobs whose turn has begun; the first of them began first."""
        jobs = list(self.jobs.values())
        return jobs if self.ready.concurrent else jobs[:1]

    def has_room(self, job: _Job) -> bool:
        assert self.process.stdin
        if self.process.stdin.is_closing():
            return False  # it has ended, and only its last words are still to be read; uvloop refuses to write to it
        if job.alone or any(other.alone for other in self.jobs.values()):
            return not self.jobs
        return len(self.jobs) < (_CONCURRENT_CALLS if self.ready.concurrent else _PIPELINED_CALLS)

    def give(self, job: _Job) -> None:
        assert self.process.stdin
        if self.ready.concurrent or not self.jobs:
            job.began_s = self._loop.time()
        self._given += 1
        self.jobs[self._given] = job
        self.process.stdin.write(pack(Call(self._given, job.request)))
        if self._timer is None:
            self._watch()

    async def replies(self) -> AsyncIterator[Reply]:
        """Replies as they come, until the process has ended."""
        assert self.process.stdout
        while data := await self.process.stdout.read(_READ_BYTES):
            for frame in self._frames.feed(data):
                yield _replies.decode(frame)
        await self.process.wait()

    def settle(self, reply: Reply) -> None:
        job = self.jobs.pop(reply.id)
        if not self.ready.concurrent and self.jobs:
            next(iter(self.jobs.values())).began_s = self._loop.time()
        _settle(job, reply)

    def kill(self) -> None:
        if self._timer:
            self._timer.cancel()
        _kill(self.process)

    def _watch(self) -> None:
        """Kill the process when the first job runs past its limit; set again only when it fires, not at every job."""
        self._timer = None
        if not self.jobs:
            return
        left_s = next(iter(self.jobs.values())).began_s + self._limit_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._watch)
        else:
            self.overdue = True
            self.kill()


class Sandbox:
    """A reward function in `workers` child processes."""

    def __init__(self, setup: Setup, children: list[_Child]) -> None:
        self._setup = setup
        self._children: list[_Child] = []
        self._queue: deque[_Job] = deque()
        self._wanted = asyncio.Event()
        self._keepers = [asyncio.create_task(self._keep(child)) for child in children]

    @classmethod
    async def open(cls, setup: Setup, *, workers: int) -> Sandbox:
        """Start the children and load the function in each.

        Raises:
            FunctionError: when it cannot be found or loaded, or asks for what a request does not have.
        """
        starts = [asyncio.create_task(_start(setup)) for _ in range(workers)]
        done = await asyncio.gather(*starts, return_exceptions=True)
        children = [child for child in done if isinstance(child, _Child)]
        for error in done:
            if isinstance(error, BaseException):
                for child in children:
                    await _end(child)
                raise error
        return cls(setup, children)

    async def call(self, request: GradeRequest) -> Reply:
        """Run the function on `request`.

        Raises:
            RewardFailed: when it raised, returned no number, ran past its limit, or ended its process.
        """
        if not self._keepers:
            raise RewardFailed("closed", "the grader is closed")
        job = _Job(request)
        self._queue.append(job)
        self._wanted.set()
        self._dispatch()
        reply = await job.reply
        if reply.reason is not None:
            raise RewardFailed(reply.reason, reply.detail)
        return reply

    async def close(self) -> None:
        """Kill the children; calls under way fail with reason `closed`."""
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        jobs = [*self._queue, *(job for child in self._children for job in child.jobs.values())]
        for child in self._children:
            await _end(child)
        for job in jobs:
            _settle(job, Reply(0, reason="closed", detail="the grader was closed"))

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
                async for reply in child.replies():
                    child.settle(reply)
                    self._dispatch()
                self._children.remove(child)
                self._bury(child)
            if child is None or not (child.jobs or self._queue):
                # Does not load any more, or ended while idle: no further try before there is new work.
                self._wanted.clear()
                await self._wanted.wait()
            try:
                child = await _start(self._setup)
            except (FunctionError, OSError) as error:
                log.error("sandbox child not replaced", function=self._setup.spec, error=str(error))
                child = None
                self._give_up(error)

    def _bury(self, child: _Child) -> None:
        """Fail the call that ended its process, and give back those that did not."""
        child.kill()
        how = _describe_exit(child.process.returncode)
        running = child.running
        reply = Reply(0, reason="exited", detail=f"the function's process ended: {how}")
        if child.overdue:
            detail = f"no reward within {self._setup.time_limit_s:g} s; the function's process was killed"
            reply = Reply(0, reason="time_limit", detail=detail)
        log.warning("sandbox child ended", function=self._setup.spec, exit=how, overdue=child.overdue)
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


async def _start(setup: Setup) -> _Child:
    """Start a child and wait until it has loaded the function."""
    # A session of its own: an interrupt in the terminal is for the worker, which ends its children itself.
    process = await asyncio.create_subprocess_exec(
        *python("-c", _BOOT, str(os.getpid()), *sys.path), stdin=PIPE, stdout=PIPE, start_new_session=True
    )
    assert process.stdin and process.stdout
    child: _Child | None = None
    try:
        process.stdin.write(pack(setup))
        frames = Frames()
        async with asyncio.timeout(_LOAD_LIMIT_S):
            while data := await process.stdout.read(_READ_BYTES):
                if found := frames.feed(data):
                    ready = msgspec.msgpack.decode(found[0], type=Ready)
                    if ready.error:
                        raise FunctionError(ready.error)
                    child = _Child(process, ready, frames, setup)
                    return child
            raise FunctionError(f"{setup.spec}: its process ended at loading: {_describe_exit(await process.wait())}")
    except TimeoutError as error:
        raise FunctionError(f"{setup.spec}: not loaded within {_LOAD_LIMIT_S:g} s") from error
    finally:
        if child is None:
            _kill(process)
            await process.wait()


async def _end(child: _Child) -> None:
    child.kill()
    await child.process.wait()


def _kill(process: Process) -> None:
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended between the two lines


def _describe_exit(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}"
