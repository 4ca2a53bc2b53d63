"""The HTTP answer to one request of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from aiohttp import web

from actors.gateway.turn import Turn
from asyncrl.live.apis.words import Api, Call, Events
from asyncrl.live.sessions import SESSION_HEADER, TURN_HEADER, Session

_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_LAST_S = 30.0  # for a client to read the end of a stream


class Reply:
    """The HTTP answer to one request: whole, or a stream that is opened by its first event."""

    def __init__(self, http: web.Request, api: Api, turn: Turn, session: Session) -> None:
        self.response: web.StreamResponse | None = None
        self._headers = {SESSION_HEADER: session.name, TURN_HEADER: turn.id}
        self._http = http
        self._turn = turn
        self._events = api.events(turn.opening, turn.request) if turn.request.stream else None

    async def send(self, text: str | Call | None) -> None:
        """See `Send`."""
        if self._http.transport is None or self._http.transport.is_closing():
            raise ConnectionResetError("the client is gone")
        if self._events is not None and text is not None:
            response = await self._opened(self._events)
            if isinstance(text, Call):
                await response.write(self._events.call(text))
            else:
                await response.write(self._events.text(text) if text else self._events.alive())

    async def end(
        self, whole: dict[str, Any], last: Callable[[Events], bytes], status: int = 200
    ) -> web.StreamResponse:
        """Send the last events, or the whole body; what fails before the first event is a refusal with its status."""
        if self._events is None or (self.response is None and status != 200):
            return web.json_response(whole, status=status, headers=self._headers)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                response = await self._opened(self._events)
                await response.write(last(self._events))
                await response.write_eof()
                return response
        if self._http.transport is not None:
            self._http.transport.abort()
        return self.response or web.Response()

    async def _opened(self, events: Events) -> web.StreamResponse:
        if self.response is None:
            self.response = web.StreamResponse(headers=_EVENTS | self._headers)
            await self.response.prepare(self._http)
            await self.response.write(events.begin())
        return self.response
