"""Generations asked for at about the same time travel as one HTTP request, and end one by one."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import aiohttp
import msgspec

from asyncrl.background import BackgroundTasks
from asyncrl.engine.answer import Generation, Member, decode_answer
from asyncrl.engine.errors import EngineError, EngineRefused, EngineUnavailable, RequestFailed
from asyncrl.http_calls import read_body

MAX_BATCH = 64
BUSY = 64  # generations in progress from which a new one waits for others
GATHER_S = 0.005  # far below a generation's seconds on a busy engine, and about the spread of one decoding step's ends
_MOST = 1 << 30  # bytes of an answer or event: with the experts of all of its tokens it may have hundreds of megabytes
_AT_THE_END = 1_000_000_000
"""The stream interval of members that want no chunks: no generation reaches it. SGLang sends the first token, too, the
embedded engine does not.
"""


class Opener(Protocol):
    """Opens an HTTP request and turns its faults into ours."""

    def __call__(
        self, method: str, path: str, body: bytes | None, *, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """A response with status 200 or 499."""


class Batcher:
    """Gathers members for one turn of the loop, or for `GATHER_S` where `BUSY` are in progress, then sends them.

    A request has at most `MAX_BATCH` members.
    """

    def __init__(
        self, open_request: Opener, abort: Callable[[str], Awaitable[None]] | None, address: str, silent_s: float
    ) -> None:
        self._open = open_request
        self._abort = abort  # ends the request of an id; None where closing its connection does, and each travels alone
        self._address = address
        self._silent_s = silent_s  # seconds without a token after which a generation has failed
        self._gathered: list[Member] = []
        self._waiting: set[Member] = set()
        self._timer: asyncio.TimerHandle | None = None  # of the one that has been silent for longest
        self._tasks = BackgroundTasks()

    async def generate(self, member: Member, *, alone: bool) -> Generation:
        """Send a member and await its end. A caller that is cancelled has its generation aborted.

        Args:
            alone: in a separate HTTP request.
        """
        sending: asyncio.Task[None] | None = None
        if alone or self._abort is None or member.traceparent:  # a request has one trace context
            sending = self._tasks.start(self._send([member]))
        else:
            if not self._gathered:
                delay_s = GATHER_S if len(self._waiting) >= BUSY else 0.0
                asyncio.get_running_loop().call_later(delay_s, self._flush)
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
            if member.left and self._abort is not None:
                self._tasks.start(self._abort_quietly(self._abort, member.rid))
            elif member.left and sending is not None:
                sending.cancel()

    async def close(self) -> None:
        """End everything in flight."""
        if self._timer is not None:
            self._timer.cancel()
        self._tasks.cancel()
        await self._tasks.ended()

    def _watch(self) -> None:
        """Fail members without an answer for too long: a deadline for each, however long its neighbours take."""
        now, seen_at = time.monotonic(), []
        for member in self._waiting:
            if member.future.done():
                continue  # its caller is about to get the result
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
        by_key: dict[tuple[str | None, str, int, int], list[Member]] = {}
        for member in gathered:
            if not member.future.done():
                by_key.setdefault((member.extra_key, member.adapter, member.priority, member.top), []).append(member)
        for members in by_key.values():
            for start in range(0, len(members), MAX_BATCH):
                self._tasks.start(self._send(members[start : start + MAX_BATCH]))

    async def _abort_quietly(self, abort: Callable[[str], Awaitable[None]], rid: str) -> None:
        try:
            await abort(rid)
        except EngineError:
            pass  # the caller has left; an engine that is gone has nothing to abort

    async def _send(self, members: list[Member]) -> None:
        try:
            await self._request(members)
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
            if member.begun:  # another generation could not continue this one: it returns with its tokens
                member.end("abort")
            elif not member.future.done():
                member.rid = secrets.token_hex(16)
                self._tasks.start(self._send([member]))

    async def _request(self, members: list[Member]) -> None:
        """One HTTP request for one generation, in SGLang's form for one, or for several."""
        alone = len(members) == 1
        streamed = members[0].streaming or not alone
        body, headers = msgspec.json.encode(_body(members, streamed=streamed)), members[0].headers if alone else {}
        async with self._open("POST", "/generate", body, headers=headers) as response:
            if response.status == 499:
                for member in members:
                    member.end("abort")
                return
            left = False
            async for event in events_of(response, streamed=streamed):
                answer = decode_answer(event)
                if answer.error is not None:
                    raise answer.error.error()
                if not 0 <= answer.index < len(members):
                    raise RequestFailed(f"an event of member {answer.index} of {len(members)}")
                members[answer.index].take(answer)
                left = left or members[answer.index].left
                if left and all(member.future.done() for member in members):
                    return  # a server that continues detects the closed connection
        if not all(member.future.done() for member in members):
            raise RequestFailed("the stream ended before all of its generations")


def _body(members: list[Member], *, streamed: bool) -> dict[str, Any]:
    alone, first = len(members) == 1, members[0]
    several: dict[str, list[Any]] = {
        "rid": [member.rid for member in members],
        "input_ids": [member.input_ids for member in members],
        "sampling_params": [
            member.sampling if alone else {"stream_interval": _AT_THE_END, **member.sampling} for member in members
        ],
    }
    body: dict[str, Any] = {name: values[0] if alone else values for name, values in several.items()}
    body |= {"return_logprob": True, "stream": streamed} | _recording(members)
    if first.extra_key is not None:
        body["extra_key"] = first.extra_key
    given = {"lora_path": first.adapter, "top_logprobs_num": first.top, "priority": first.priority}
    return body | {name: value for name, value in given.items() if value}


def _recording(members: list[Member]) -> dict[str, Any]:
    """Fields that ask for experts, where members want any: SGLang takes one first token for all of a request."""
    wanted = [member.routed for member in members if member.routed is not None]
    if not wanted:
        return {}
    for member in members:
        member.routed = min(wanted)
    return {"return_routed_experts": True, "routed_experts_start_len": min(wanted)}


async def events_of(response: aiohttp.ClientResponse, *, streamed: bool) -> AsyncIterator[bytes]:
    """The JSON of each server-sent event, up to `[DONE]`, or of the whole answer."""
    if not streamed:
        yield await read_body(response, _MOST)
        return
    rest = bytearray()  # of an event, which may have megabytes: it is looked through once
    async for data in response.content.iter_any():
        whole = data
        if rest:
            seam = rest[-1:] + data
            rest += data
            if b"\n\n" not in seam:
                if len(rest) > _MOST:
                    raise aiohttp.ClientPayloadError(f"more than {_MOST} bytes came without the end of an event")
                continue
            whole, rest = bytes(rest), bytearray()
        *events, begun = whole.split(b"\n\n")
        rest += begun
        for event in events:
            payload = event.strip().removeprefix(b"data:").strip()
            if payload == b"[DONE]":
                async for _ in response.content.iter_any():
                    break  # nothing should come: at its end the connection can be used again
                return
            if payload:
                yield payload
