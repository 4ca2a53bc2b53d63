"""The HTTP answer to one request of the gateway."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from actors.gateway.turn import Turn
from actors.runtime.actor import Context
from asyncrl.errors import places
from asyncrl.live.apis.registry import APIS, MESSAGES
from asyncrl.live.apis.schema import Api, Ending, LiveError, Piece
from asyncrl.live.reply import event_of
from asyncrl.live.sessions import SESSION_HEADER, TURN_HEADER, Session

Keep = Callable[[bytes], Awaitable[None]]
Answered = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OPENED = web.RequestKey("opened", web.StreamResponse)  # its reply, of which the first event is sent
_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_READ_S = 30.0  # for a client to read the sent bytes


def refusal(api: Api, error: LiveError, turn: str = "", headers: Mapping[str, str] = {}) -> web.Response:
    """Return the answer to a request that gets no reply, with the time of the next attempt if it is known."""
    turn = turn or secrets.token_hex(12)
    status, body = api.error(error, turn)
    later = {} if error.retry_s is None else {"Retry-After": str(error.retry_s)}
    return web.json_response(body, status=status, headers={**id_headers(turn), **headers, **later})


def id_headers(turn: str) -> dict[str, str]:
    """Return the id of a request where the SDKs look for it: Anthropic's, OpenAI's."""
    return dict.fromkeys(("request-id", "x-request-id"), f"req_{turn}")


def _api_of(http: web.Request) -> Api:
    """Return the API whose shape an error has: that of the path, or of the client where all of them ask a path."""
    client = MESSAGES if "anthropic-version" in http.headers else APIS["chat"]
    return next((api for api in APIS.values() if http.path.startswith(api.path)), client)


def refuse(http: web.Request, error: LiveError) -> web.Response:
    """Return the refusal of a request in the shape of its API."""
    return refusal(_api_of(http), error)


def shape_errors(context: Context) -> Middleware:
    """Return what answers, in the shape of its API, a request that is refused or at which the gateway itself fails."""

    @web.middleware
    async def shaped(request: web.Request, handler: Answered) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException:
            raise
        except LiveError as error:
            context.count("requests_refused")
            return refuse(request, error)
        except ConnectionError:  # before its request was whole
            context.count("clients_gone")
            return web.Response()
        except Exception as error:  # noqa: BLE001 - logged, without its words and the path, which may quote what is said
            api = _api_of(request)
            context.log.error("a request fails", api=api.path, error=type(error).__name__, at=places(error))
            context.count("requests_broken")
            opened: web.StreamResponse | None = request.get(_OPENED)
            if opened is not None:  # nothing can follow half an event
                if request.transport is not None:
                    request.transport.abort()
                return opened
            return refusal(api, LiveError("internal", "the gateway failed at this request"))

    return shaped


class Reply:
    """The HTTP answer to one request, whose choices are turns: whole, or a stream that is opened by its first event."""

    def __init__(
        self, http: web.Request, api: Api, turns: list[Turn], session: Session, keep: Keep | None = None
    ) -> None:
        """
        Args:
            keep: stores what a client may retrieve later, before it gets the end; None: nothing.
        """
        self.response: web.StreamResponse | None = None
        self._headers = id_headers(turns[0].id) | {SESSION_HEADER: session.name}
        self._headers[TURN_HEADER] = ",".join(turn.id for turn in turns)
        self._http = http
        self._preparing = asyncio.Lock()
        self._keep = keep
        self._api = api
        self._opening, self._request = turns[0].opening, turns[0].request
        streams = range(len(turns)) if self._request.stream else ()
        self._events = [api.events(self._opening, self._request, number) for number in streams]

    @property
    def missed(self) -> bool:
        """Return whether the client is gone."""
        return self._http.transport is None or self._http.transport.is_closing()

    async def send(self, choice: int, piece: Piece | None) -> None:
        """See `Send`."""
        if self.missed:
            raise ConnectionResetError("the client is gone")
        if self._events and piece is not None:
            await self._write(lambda: event_of(self._events[choice], piece))

    async def end(self, endings: list[Ending]) -> web.StreamResponse:
        """Send the last events, or the whole body."""

        def whole() -> bytes:
            return msgspec.json.encode(self._api.whole(self._opening, self._request, endings))

        def last() -> bytes:
            ends = [events.end(ending) for events, ending in zip(self._events, endings, strict=True)]
            return b"".join(ends) + self._events[0].done(endings)

        if self._events:
            return await self._write(last, last=True)
        body = await self._made(whole)
        if self._keep is not None:
            await self._keep(body)
        return web.Response(body=body, content_type="application/json", charset="utf-8", headers=self._headers)

    async def _made(self, content: Callable[[], bytes]) -> bytes:
        """Return the end of a reply: its log-probs may be megabytes, while other streams wait for the loop."""
        return await asyncio.to_thread(content) if self._request.logprobs else content()

    async def fail(self, error: LiveError) -> web.StreamResponse:
        """Send the event of a failure; what fails before the first event is a refusal with its status."""
        if self._events and self.response is not None:
            return await self._write(lambda: self._events[0].fail(error), last=True)
        return refusal(self._api, error, self._opening.turn, self._headers)

    async def _write(self, events: Callable[[], bytes], *, last: bool = False) -> web.StreamResponse:
        """Write events after the first ones, which have the first numbers; a client that reads nothing is cut off."""
        timer = asyncio.get_running_loop().call_later(_READ_S, self._cut)  # costs less than a timeout
        try:
            response = await self._opened()
            content = await self._made(events) if last else events()
            if last and self._keep is not None and (kept := self._events[0].response) is not None:
                await self._keep(msgspec.json.encode(kept))
            await response.write(content)
            if last:
                await response.write_eof()
        finally:
            timer.cancel()
        if self.missed:
            raise ConnectionResetError("the client is gone, or reads nothing")
        return response

    def _cut(self) -> None:
        if self._http.transport is not None:
            self._http.transport.abort()

    async def _opened(self) -> web.StreamResponse:
        async with self._preparing:  # choices come at the same time
            if self.response is None:
                self._http[_OPENED] = self.response = web.StreamResponse(headers=_EVENTS | self._headers)
                await self.response.prepare(self._http)
                await self.response.write(b"".join(events.begin() for events in self._events))
            return self.response
