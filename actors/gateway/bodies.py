"""Bodies of requests as they come over HTTP."""

from __future__ import annotations

import asyncio

from aiohttp import web

from asyncrl.live.apis.words import LiveError

_BODY_S = 120.0  # for a client to send a body


def room_of(http: web.Request, most: int) -> int:
    """Return how many bytes the body of a request may take in memory: `most` where nothing says how large it is."""
    if http.content_length is None or "Content-Encoding" in http.headers:
        return most
    return http.content_length


async def read_body(http: web.Request, most_bytes: int) -> bytes:
    """Return the body of a request; aiohttp's own way keeps it as long as the request is under way.

    Raises:
        LiveError: it is larger, does not come in time, or is not encoded as its headers say.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in http.content.iter_any():
                body += part
                if len(body) > most_bytes:
                    raise LiveError("large", f"the body is larger than {most_bytes:,} bytes")
    except TimeoutError as error:
        raise LiveError("invalid", f"the body has not come within {_BODY_S:g} s") from error
    except web.RequestPayloadError as error:
        raise LiveError("invalid", "the body is not encoded as its headers say; send it as it is") from error
    return bytes(body)
