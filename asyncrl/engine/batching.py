"""Generations asked for in one turn of the event loop travel as one HTTP request, and end one by one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import aiohttp
import msgspec

from asyncrl.engine.answer import Answer, Assembly, Chunk, Generation, decode_answer
from asyncrl.engine.errors import EngineError, EngineRefused, EngineUnavailable

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
        on_tokens: Callable[[Chunk], None] | None,
    ) -> None:
        self.rid = secrets.token_hex(16)  # SGLang matches ids by prefix: only random ones are safe
        self.input_ids = input_ids
        self.sampling = sampling
        self.extra_key = extra_key
        self.streaming = on_tokens is not None
        self.assembly = Assembly(on_tokens)
        self.future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()

    def settle(self) -> None:
        """Answer the caller if the generation ended."""
        if self.assembly.finished and not self.future.done():
            self.future.set_result(self.assembly.result())

    def fail(self, fault: EngineError) -> None:
        """Tell the caller, unless it was answered or left."""
        if not self.future.done():
            self.future.set_exception(fault)


class Batcher:
    """Gathers members for one turn of the loop, then sends them, at most `MAX_BATCH` to a request."""

    def __init__(self, open_request: Opener, abort: Callable[[str], Awaitable[None]]) -> None:
        self._open = open_request
        self._abort = abort
        self._gathered: list[Member] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, member: Member) -> Generation:
        """Send a member and await its end. A caller that is cancelled has its generation aborted."""
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._flush)
        self._gathered.append(member)
        try:
            return await member.future
        except asyncio.CancelledError:
            self._spawn(self._abort_quietly(member.rid))
            raise

    async def close(self) -> None:
        """Cancel everything in flight."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
        except EngineRefused as fault:
            if len(members) > 1:  # the refusal may concern one prompt only: each gets its own answer
                for member in members:
                    if not member.future.done():
                        self._spawn(self._send([member]))
            else:
                members[0].fail(fault)
        except EngineError as fault:
            for member in members:
                member.fail(fault)
        except asyncio.CancelledError:
            for member in members:
                member.future.cancel()
            raise

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
                    member.assembly.add(_checked(event))
            else:
                member.assembly.add(_checked(await response.read()))
        if not member.assembly.finished:
            raise EngineUnavailable(str(response.url.origin()), "the stream ended before the generation")
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
            async for event in _events(response):
                answer = _checked(event)
                member = members[answer.index]
                member.assembly.add(answer)
                member.settle()
        if not all(member.assembly.finished for member in members):
            raise EngineUnavailable(str(response.url.origin()), "the stream ended before all of its generations")


def _encode(body: dict[str, Any], extra_key: str | None) -> bytes:
    if extra_key is not None:
        body["extra_key"] = extra_key
    return msgspec.json.encode(body)


def _checked(raw: bytes) -> Answer:
    answer = decode_answer(raw)
    if answer.error is not None:
        raise EngineRefused(answer.error.message)
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
