"""The port of a gateway: so many connections at once, and none waits for ever for a request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import AsyncIterator

from aiohttp import web

_LEAVE_S = 5.0  # for replies under way when it is asked to stop
_WAITING = 1024  # connections that the system holds until they are taken
_FILES = 512  # that are open besides connections, those of files among them
_WORDS = b'{"error": {"message": "the gateway has too many connections; try again", "type": "server_error"}}'
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_WORDS), _WORDS)
)


@contextlib.asynccontextmanager
async def listening(app: web.Application, host: str, port: int, *, most: int, silent_s: float) -> AsyncIterator[None]:
    """Serve an application for the length of the block.

    Args:
        most: connections at once; fewer where the system allows the process fewer open files.
        silent_s: seconds after which a connection without a whole request is closed, in the middle of headers, too.

    Raises:
        OSError: it cannot listen there.
    """
    most = _connections(most)
    # What aiohttp calls keep-alive is counted from the begin of a connection, and from the end of each reply.
    runner = web.AppRunner(
        app,
        shutdown_timeout=_LEAVE_S,
        keepalive_timeout=silent_s,
        handler_cancellation=True,
        access_log=None,
        logger=_quiet(),
    )
    await runner.setup()
    server = runner.server
    assert server is not None

    def connected() -> asyncio.Protocol:
        return server() if len(server.connections) < most else _Full()

    try:
        loop = asyncio.get_running_loop()
        port_of = await loop.create_server(connected, host, port, reuse_port=True, backlog=_WAITING)
        try:
            yield
        finally:
            port_of.close()
    finally:
        await runner.cleanup()


def _quiet() -> logging.Logger:
    """Return a log that nobody reads: aiohttp quotes what it cannot read, which may be what is said."""
    quiet = logging.getLogger("asyncrl.gateway.http")
    quiet.propagate = False
    quiet.addHandler(logging.NullHandler())
    return quiet


class _Full(asyncio.Protocol):
    """A connection too many: it is told so, and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(_FULL)
        transport.close()


def _connections(wanted: int) -> int:
    """Return how many connections the process may have; each takes a file, and another one to an engine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = 2 * wanted + _FILES
    if resource.RLIM_INFINITY != soft < files:
        soft = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, (soft - _FILES) // 2))
