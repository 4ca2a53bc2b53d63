"""Calls of other people's HTTP servers: tried again where that may help, answers read up to a size."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp

from asyncrl.errors import AsyncRLError

_FIRST_WAIT_S, _LAST_WAIT_S = 0.1, 5.0
SHOWN_CHARS = 300  # of an answer, in errors
T = TypeVar("T")


class NoAnswer(AsyncRLError):
    """A server gave no answer in time; the words name its last fault."""


def open_session(headers: dict[str, str] | None = None) -> aiohttp.ClientSession:
    """Open connections without a bound or time limit of their own: the caller has both."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None),
        connector=aiohttp.TCPConnector(limit=0),
        headers={"Content-Type": "application/json"} | (headers or {}),
    )


async def answered(ask: Callable[[], Awaitable[T]], limit_s: float) -> T:
    """Ask until there is an answer: again after a transient fault, 0.1 s later and then twice as long each time.

    Args:
        ask: raises `aiohttp.ClientError` or `OSError` where another try may help.
        limit_s: seconds that all tries may take together.

    Raises:
        NoAnswer: the time is over.
    """
    fault, wait_s = "no answer", _FIRST_WAIT_S
    try:
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    return await ask()
                except (aiohttp.ClientError, OSError) as error:
                    fault = str(error) or type(error).__name__
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))  # so that workers do not return together
                wait_s = min(2 * wait_s, _LAST_WAIT_S)
    except TimeoutError:
        raise NoAnswer(fault) from None


async def read_at_most(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the body, or its beginning where it has more than `most` bytes."""
    text = b""
    while len(text) <= most and (part := await response.content.readany()):
        text += part
    return text


def check_transient(response: aiohttp.ClientResponse, text: bytes) -> None:
    """
    Raises:
        aiohttp.ClientError: the status, 429 or 5xx, is one after which another try may help.
    """
    if response.status == 429 or response.status >= 500:
        raise aiohttp.ClientError(f"status {response.status}: {text[:SHOWN_CHARS].decode(errors='replace')}")
