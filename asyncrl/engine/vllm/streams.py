"""Streams of vLLM, whose tokens are handed on when their version is known.

vLLM names the versions of all tokens in the last event of a stream. Before, the server is asked for the name of its
weights. Tokens that came before the question are of that version if it is the one of the request's beginning: versions
follow one another, and none returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from asyncrl.background import BackgroundTasks
from asyncrl.engine.answer import Member
from asyncrl.engine.batching import Batcher, events_of
from asyncrl.engine.errors import EngineError, RequestFailed
from asyncrl.engine.vllm.answers import Event, joined, read_event, request_body
from asyncrl.engine.vllm.api import GENERATE

_PAUSE_S = 0.1  # between two questions


class StreamBatcher(Batcher):
    """Sends each generation as a separate request: vLLM takes one prompt in each."""

    ask: Callable[[], Awaitable[str]]  # the server's name of its weights
    announced = ""  # name that the server has confirmed most recently

    async def _request(self, members: list[Member]) -> None:
        [member] = members
        body = msgspec.json.encode(request_body(member, streamed=member.streaming))
        stream = _Stream(member, self.announced or await self.ask() if member.streaming else "")
        confirming = BackgroundTasks()
        try:
            async with self._open("POST", GENERATE, body, headers=member.headers) as response:
                async for raw in events_of(response, streamed=member.streaming):
                    stream.take(read_event(raw))
                    if member.left:
                        return  # a server that continues detects the closed connection
                    if stream.asks:
                        stream.asking = True
                        confirming.start(self._confirm(stream))
            stream.end()
        finally:
            confirming.cancel()
            await confirming.ended()

    async def _confirm(self, stream: _Stream) -> None:
        """Hand tokens on until the versions of the next ones are known from the last event alone."""
        while stream.held and not stream.ended:
            held = len(stream.held)
            try:
                version = await self.ask()
            except EngineError:
                break  # the stream breaks, too, or the next event asks again
            if version != stream.version:
                stream.changed = True
            elif not stream.ended:
                stream.hand_on(held, version)
            await asyncio.sleep(_PAUSE_S)
            if stream.changed:
                break
        stream.asking = False


class _Stream:
    """The events of one generation."""

    def __init__(self, member: Member, version: str) -> None:
        self.held: list[Event] = []  # whose tokens are not handed on yet
        self.version = version  # of the weights that the server had before the request
        self.changed = False  # the server has other weights now
        self.ended = False  # the last token has come
        self.asking = False
        self._member = member
        self._have = 0

    @property
    def asks(self) -> bool:
        """Return whether the server should be asked for the name of its weights."""
        return bool(self.held) and not (self.ended or self.changed or self.asking)

    def take(self, event: Event) -> None:
        """Hold an event."""
        self.held.append(event)
        self._member.touch()
        self.ended = self.ended or any(choice.finish_reason for choice in event.choices)

    def hand_on(self, count: int, version: str = "") -> None:
        """Give the caller the tokens of the first events."""
        events, self.held = self.held[:count], self.held[count:]
        answer = joined(events, self._have, self._member.top, version)
        self._have += len(answer.output_ids)
        self._member.take(answer)

    def end(self) -> None:
        """Give the caller all tokens, with the versions that the last event names.

        Raises:
            RequestFailed: the stream had no end.
        """
        if not self.ended:
            raise RequestFailed("the stream ended before its generation")
        self.hand_on(len(self.held))
