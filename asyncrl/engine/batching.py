"""Generations asked for in one turn of the event loop travel as one HTTP request, and end one by one."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import aiohttp
import msgspec

from asyncrl.engine.answer import Answer, Assembly, Generation, OnTokens, decode_answer
from asyncrl.engine.errors import EngineError, EngineRefused, EngineUnavailable, RequestFailed

MAX_BATCH = 64
_AT_THE_END = 1_000_000_000
"""The stream interval of members that want no chunks: no generation reaches it, their only event is the last."""


class Opener(Protocol):
    """Opens an HTTP request and turns its faults into ours."""

    def __call__(
        self, method: str, path: str, body: bytes | None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """A response with status 200 or 499."""


class Member:
    """One generation on its way."""

    def __init__(
        self,
        input_ids: list[int],
        sampling: dict[str, Any],
        extra_key: str | None,
        on_tokens: OnTokens | None,
    ) -> None:
        self.rid = secrets.token_hex(16)  # SGLang matches ids by prefix: only random ones are safe
        self.input_ids = input_ids
        self.sampling = sampling
        self.extra_key = extra_key
        self.streaming = on_tokens is not None
        self.assembly = Assembly(on_tokens)
        self.future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self.left = False  # by its caller, while the engine may go on with it
        self.seen_at = time.monotonic()  # when its last part came, or when it was requested

    def take(self, answer: Answer) -> None:
        """Take in what came of it; answers the caller if it ended."""
        if self.future.done():
            return
        self.seen_at = time.monotonic()
        try:
            self.assembly.add(answer)
        except Exception as fault:  # the engine's, or one of the caller's own callback: each is for the caller alone
            self.left = True
            self.fail(fault)
        else:
            self.left = self.assembly.cut
            self.settle()

    def settle(self) -> None:
        """Answer the caller if the generation ended."""
        if self.assembly.finished and not self.future.done():
            self.future.set_result(self.assembly.result())

    def fail(self, fault: Exception) -> None:
        """Notify the caller, unless it was answered or left."""
        if not self.future.done():
            self.future.set_exception(fault)


class Batcher:
    """Gathers members for one turn of the loop, then sends them, at most `MAX_BATCH` to a request."""

    def __init__(
        self, open_request: Opener, abort: Callable[[str], Awaitable[None]], address: str, silent_s: float
    ) -> None:
        """
        Args:
            silent_s: seconds without a token after which a generation has failed.
        """
        self._open = open_request
        self._abort = abort
        self._address = address
        self._silent_s = silent_s
        self._gathered: list[Member] = []
        self._waiting: set[Member] = set()
        self._timer: asyncio.TimerHandle | None = None  # of the one that has been silent for longest
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, member: Member, *, alone: bool) -> Generation:
        """Send a member and await its end. A caller that is cancelled has its generation aborted.

        Args:
            alone: in an HTTP request of its own.
        """
        if alone:
            self._spawn(self._send([member]))
        else:
            if not self._gathered:
                asyncio.get_running_loop().call_soon(self._flush)
            self._gathered.append(member)
        self._waiting.add(member)
        if self._timer is None:
            self._watch()
        try:
            return await member.future
        except asyncio.CancelledError:
            member.left = True
            raise
        finally:
            self._waiting.discard(member)
            if member.left:
                self._spawn(self._abort_quietly(member.rid))

    async def close(self) -> None:
        """End everything in flight."""
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _watch(self) -> None:
        """Fail members without an answer for too long: a deadline for each, however long its neighbours take."""
        now, seen_at = time.monotonic(), []
        for member in self._waiting:
            if member.future.done():
                continue  # its caller is about to be told
            if member.seen_at + self._silent_s <= now:
                member.left = True
                member.fail(RequestFailed(f"no token for {self._silent_s:g} s"))
            else:
                seen_at.append(member.seen_at)
        self._timer = None
        if seen_at:  # those that come later are due later
            due_s = min(seen_at) + self._silent_s - now
            self._timer = asyncio.get_running_loop().call_later(due_s, self._watch)

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        by_key: dict[str | None, list[Member]] = {}
        for member in gathered:
            if not member.future.done():
                by_key.setdefault(member.extra_key, []).append(member)
        for members in by_key.values():
            for start in range(0, len(members), MAX_BATCH):
                self._spawn(self._send(members[start : start + MAX_BATCH]))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _abort_quietly(self, rid: str) -> None:
        try:
            await self._abort(rid)
        except EngineError:
            pass  # the caller has left; an engine that is gone has nothing to abort

    async def _send(self, members: list[Member]) -> None:
        try:
            if len(members) == 1:
                await self._send_one(members[0])
            else:
                await self._send_batch(members)
        except (EngineRefused, RequestFailed) as fault:
            self._send_apart(members, fault)
        except EngineError as fault:
            for member in members:
                member.fail(fault)
        except asyncio.CancelledError:
            for member in members:
                member.fail(EngineUnavailable(self._address, "its client was closed"))
            raise

    def _send_apart(self, members: list[Member], fault: EngineError) -> None:
        """The fault may concern one member only: each that has no token yet is sent again, alone."""
        if len(members) == 1:
            members[0].fail(fault)
            return
        for member in members:
            if member.assembly.begun:  # another generation could not continue this one: it comes back with what it has
                member.assembly.abort()
                member.settle()
            elif not member.future.done():
                member.rid = secrets.token_hex(16)
                self._spawn(self._send([member]))

    async def _send_one(self, member: Member) -> None:
        body = {
            "rid": member.rid,
            "input_ids": member.input_ids,
            "sampling_params": member.sampling,
            "return_logprob": True,
            "stream": member.streaming,
        }
        async with self._open("POST", "/generate", _encode(body, member.extra_key)) as response:
            if response.status == 499:
                member.assembly.abort()
            elif member.streaming:
                async for event in _events(response):
                    member.take(_checked(event))
                    if member.left:
                        return  # closing the connection tells a server that goes on that the client has left
            else:
                member.take(_checked(await response.read()))
        if not (member.assembly.finished or member.future.done()):
            raise RequestFailed("the stream ended before the generation")
        member.settle()

    async def _send_batch(self, members: list[Member]) -> None:
        body = {
            "rid": [member.rid for member in members],
            "input_ids": [member.input_ids for member in members],
            "sampling_params": [{"stream_interval": _AT_THE_END, **member.sampling} for member in members],
            "return_logprob": True,
            "stream": True,
        }
        async with self._open("POST", "/generate", _encode(body, members[0].extra_key)) as response:
            if response.status == 499:
                for member in members:
                    member.assembly.abort()
                    member.settle()
                return
            left = False
            async for event in _events(response):
                answer = _checked(event)
                if not 0 <= answer.index < len(members):
                    raise RequestFailed(f"an event of member {answer.index} of {len(members)}")
                members[answer.index].take(answer)
                left = left or members[answer.index].left
                if left and all(member.future.done() for member in members):
                    return  # closing the connection tells a server that goes on that the client has left
        if not all(member.future.done() for member in members):
            raise RequestFailed("the stream ended before all of its generations")


def _encode(body: dict[str, Any], extra_key: str | None) -> bytes:
    if extra_key is not None:
        body["extra_key"] = extra_key
    return msgspec.json.encode(body)


def _checked(raw: bytes) -> Answer:
    answer = decode_answer(raw)
    if answer.error is not None:
        raise answer.error.error()
    return answer


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The JSON of each server-sent event, up to `[DONE]`."""
    rest = b""
    async for data in response.content.iter_any():
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            payload = event.strip().removeprefix(b"data:").strip()
            if payload == b"[DONE]":
                await response.read()  # lets the connection be used again
                return
            if payload:
                yield payload
