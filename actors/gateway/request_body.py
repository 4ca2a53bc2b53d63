"""Bodies of requests as they come over HTTP."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

from aiohttp import web

from asyncrl.live.apis.schema import LiveError

_BODY_S = 120.0  # for a client to send a body
_PACKED = ("gzip", "deflate")
_ZLIB_OR_GZIP = 47  # window bits: zlib accepts both header formats


def room_of(http: web.Request, most: int) -> int:
    """Return how many bytes the body of a request may take in memory: `most` if the request does not state its size."""
    if http.content_length is None or "Content-Encoding" in http.headers:
        return most
    return http.content_length


async def read_body(http: web.Request, most_bytes: int) -> bytes:
    """Return the body of a request; aiohttp would keep the body in memory as long as the request runs.

    It is unpacked here: aiohttp unpacks all that comes, also of a request that is refused, with or without a key.

    Raises:
        LiveError: it is larger, does not come in time, or is not encoded as its headers say.
    """
    body, packed = bytearray(), _unpacking(http)
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in http.content.iter_any():
                body += part if packed is None else packed.decompress(part, most_bytes + 1 - len(body))
                if len(body) > most_bytes:
                    raise LiveError("large", f"the body is larger than {most_bytes:,} bytes")
        if packed is not None and not packed.eof:
            raise zlib.error("its end is missing")
    except TimeoutError as error:
        raise LiveError("invalid", f"the body has not come within {_BODY_S:g} s") from error
    except (web.RequestPayloadError, zlib.error) as error:
        raise LiveError("invalid", "the body is not encoded as its headers say; send it without an encoding") from error
    return bytes(body)


def _unpacking(http: web.Request) -> Any:
    """Return a zlib decompressor for a body; None for an uncompressed one.

    Raises:
        LiveError: its encoding is not known here.
    """
    encoding = http.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding == "identity":
        return None
    if encoding not in _PACKED:
        raise LiveError(
            "invalid", f"the body has a Content-Encoding that is not known here; expected {' or '.join(_PACKED)}"
        )
    return zlib.decompressobj(_ZLIB_OR_GZIP)
