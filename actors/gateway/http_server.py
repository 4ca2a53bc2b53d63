"""The port of a gateway: it limits the connections, lets no connection wait for ever, and closes silent ones for new
ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import secrets
import socket
from collections.abc import AsyncIterator, Iterable
from http import HTTPStatus
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from actors.gateway.reply import id_headers
from asyncrl.ports import Listen
from asyncrl.run.gateway_port import WAITING

_READ_S = 30.0  # for a client to read anything of what waits to be sent
_END_S = 1.0  # for requests that still run at the end
_ANSWERED = 3  # `loss` of a connection whose request is being answered
_FILES = 512  # open files in addition to the connections


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, place: Listen | socket.socket, *, most: int, silent_s: float
) -> AsyncIterator[OpenPort]:
    """Serve an application for the length of the block.

    Args:
        place: an address, or a socket that listens.
        most: connections at once; fewer where the system allows the process fewer open files.
        silent_s: seconds after which a connection without a whole request is closed, in the middle of headers, too.

    Raises:
        OSError: it cannot listen there.
    """
    most = _connections(most)
    # What aiohttp calls keep-alive is counted from the begin of a connection, and from the end of each reply.
    opened = OpenPort()
    app.on_response_prepare.append(opened.end_connection)
    runner = web.AppRunner(app, shutdown_timeout=_END_S, handler_cancellation=True)
    await runner.setup()
    server, loop, quiet = runner.server, asyncio.get_running_loop(), _quiet()
    assert server is not None

    def connected() -> asyncio.Protocol:
        if len(server.connections) >= most and not _make_room(cast(list[_Connection], server.connections)):
            return _Full()
        return _Connection(
            server, loop=loop, keepalive_timeout=silent_s, access_log=quiet, logger=quiet, auto_decompress=False
        )

    try:
        if isinstance(place, socket.socket):
            accepting = await loop.create_server(connected, sock=place, backlog=WAITING)
        else:
            accepting = await loop.create_server(connected, *place, reuse_port=True, backlog=WAITING)
        try:
            opened.begin(accepting, server)
            yield opened
        finally:
            accepting.close()
    finally:
        await runner.cleanup()


class OpenPort:
    """A port that accepts connections."""

    _accepting: asyncio.Server
    _server: web.Server

    def __init__(self) -> None:
        self._is_closed = False

    def begin(self, accepting: asyncio.Server, server: web.Server) -> None:
        """Take note of what accepts connections, and what answers them."""
        self._accepting, self._server = accepting, server

    def close(self) -> None:
        """Accept no more connections, and close each connection after its next answer."""
        self._is_closed = True
        self._accepting.close()
        for one in cast(list[_Connection], self._server.connections):
            one.retire()

    async def end_connection(self, _request: web.Request, response: web.StreamResponse) -> None:
        """Let the connection end with a response, once the port is closed."""
        if self._is_closed:
            response.force_close()
            response.headers["Connection"] = "close"


def _make_room(connections: Iterable[_Connection]) -> bool:
    """Cut off the oldest of the connections with which the least is lost; False where requests of all are answered.

    Otherwise a client that opens connections and sends nothing, or a byte per second, would keep all others out.
    """
    least: _Connection | None = None
    for one in connections:
        if not one.is_cut and one.loss < (_ANSWERED if least is None else least.loss):
            least = one
            if not least.loss:
                break
    if least is not None:
        least.cut()
    return least is not None


def _quiet() -> logging.Logger:
    """Return a log without readers: aiohttp quotes unreadable requests, which may hold a conversation."""
    quiet = logging.getLogger("asyncrl.gateway.http")
    quiet.propagate = False
    quiet.setLevel(logging.CRITICAL)
    quiet.addHandler(logging.NullHandler())
    return quiet


class _Connection(web.RequestHandler):
    """Refuses what cannot be read as HTTP, in a shape that SDKs of both APIs read; the parser's own words quote it.
    Cuts off a client that reads nothing: to close its connection would wait for it without an end."""

    __slots__ = ("_look_again", "_out")

    @property
    def is_cut(self) -> bool:
        """Return whether it is closed, or about to be."""
        return self._out.is_closing()

    @property
    def loss(self) -> int:
        """Return how much is lost with it: nothing was asked, or nothing now; a body is not whole; `_ANSWERED`."""
        if not self._request_in_progress:
            return 1 if self._request_count else 0
        reads = self._current_request is not None and not self._current_request.content.is_eof()
        return 2 if reads else _ANSWERED

    def cut(self) -> None:
        """Close it at once."""
        self._out.abort()

    def retire(self) -> None:
        """Close it, now or after the answer to its request; one that has not sent a whole request yet is answered."""
        if self.loss == _ANSWERED:
            self._close = True  # further data is ignored
        elif self.loss == 1:
            self._out.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._out = cast(asyncio.WriteTransport, transport)
        self._out.set_write_buffer_limits(high=0)  # `pause_writing` comes with the first byte that waits

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        self._look(-1)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        self._look_again.cancel()

    def _look(self, before: int) -> None:
        """Cut the client off if it has read nothing since the last look; look again later unless everything is sent."""
        waits = self._out.get_write_buffer_size()
        if waits == before:
            self.cut()
        self._look_again = self._loop.call_later(_READ_S, self._look, waits)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See `asyncio.Protocol`."""
        if self._paused:
            self._look_again.cancel()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """See `web.RequestHandler`."""
        super().handle_error(request, status, exc, message)  # raises where an answer has begun
        words = "the request cannot be read as HTTP/1.1: a line of its head is malformed"
        if isinstance(exc, LineTooLong) or "Too many headers" in str(exc):
            words = "the first line or the headers of the request are too long; send shorter ones"
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        elif status == HTTPStatus.INTERNAL_SERVER_ERROR:
            words = "the gateway failed at this request"
        kind = "server_error" if status == HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        headers, body = _refusal(kind, words)
        answer = web.json_response(body, status=status, headers=headers)
        answer.force_close()
        return answer


class _Full(asyncio.Protocol):
    """A connection too many: it gets an answer, and is closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        out = cast(asyncio.WriteTransport, transport)  # that of uvloop is no instance
        headers, body = _refusal("server_error", "the gateway has too many connections; try again")
        content = json.dumps(body).encode()
        headers |= {"Retry-After": "1", "Connection": "close", "Content-Type": "application/json"}
        lines = [f"{name}: {value}\r\n" for name, value in {**headers, "Content-Length": len(content)}.items()]
        out.write("".join(["HTTP/1.1 503 Service Unavailable\r\n", *lines, "\r\n"]).encode() + content)
        out.close()


def _refusal(kind: str, words: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return headers with the id of a request, and a body that SDKs of both APIs read: its API may not be known."""
    headers = id_headers(secrets.token_hex(12))
    error = {"message": words, "type": kind, "param": None, "code": None}
    return headers, {"type": "error", "error": error, "request_id": headers["request-id"]}


def _connections(wanted: int) -> int:
    """Return how many connections the process may have; each takes a file, and another one to an engine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = 2 * wanted + _FILES
    if resource.RLIM_INFINITY != soft < files:
        soft = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, (soft - _FILES) // 2))
