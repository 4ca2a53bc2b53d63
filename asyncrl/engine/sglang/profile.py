"""The profiler of SGLang servers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import msgspec

from asyncrl.errors import AsyncRLError
from asyncrl.http_calls import NoAnswer, answered, open_session, post

_LIMIT_S, _ANSWER_BYTES = 30.0, 4096  # of an answer


async def record_server(address: str, key: str | None, folder: Path, seconds: float) -> None:
    """Start the profiler of a server, and stop it after some seconds.

    Raises:
        AsyncRLError: the server does not answer, or refuses.
    """
    begin = msgspec.json.encode({"output_dir": str(folder)})
    async with open_session({"Authorization": f"Bearer {key}"} if key else None) as session:
        try:
            await answered(lambda: post(session, f"{address}/start_profile", begin, _ANSWER_BYTES), _LIMIT_S)
            await asyncio.sleep(seconds)
            await answered(lambda: post(session, f"{address}/stop_profile", b"{}", _ANSWER_BYTES), _LIMIT_S)
        except (NoAnswer, aiohttp.ClientError, OSError) as error:
            raise AsyncRLError(f"{address} recorded no profile: {error}") from error
