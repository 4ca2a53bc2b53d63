"""Calls of foreign HTTP servers: repeated if that may help, answers read up to a size."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp

from asyncrl.errors import AsyncRLError
from asyncrl.tracing import trace_headers, traceparent

_FIRST_WAIT_S, _LAST_WAIT_S = 0.1, 5.0
_SHOWN = 300  # bytes of an answer, in errors
T = TypeVar("T")


class NoAnswer(AsyncRLError):
    """A server gave no answer in time; the words name its last fault."""


class Refused(AsyncRLError):
    """A server answered with a status after which another try is of no use."""


def open_session(headers: dict[str, str] | None = None) -> aiohttp.ClientSession:
    """Open connections without a bound or time limit: the caller has both."""
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


async def post(session: aiohttp.ClientSession, url: str, body: bytes, most: int) -> bytes:
    """Post JSON once; returns the answer, or its beginning if it has more than `most` bytes.

    A redirection is not followed: the body goes to the address that the settings name, and to no other. The request has
    the trace context of the trajectory that the task works on.

    Raises:
        aiohttp.ClientError: another try may help, as after status 429 or 5xx.
        Refused: any other status that is no success.
    """
    async with session.post(url, data=body, headers=trace_headers(traceparent()), allow_redirects=False) as response:
        text = await _read_beginning(response, most)
        if response.status == 429 or response.status >= 500:
            raise aiohttp.ClientError(f"status {response.status}: {beginning(text)}")
        if response.status >= 300:
            to = f" and names {response.headers['Location']}" if "Location" in response.headers else ""
            raise Refused(f"{url} answered status {response.status}{to}: {beginning(text)}")
    return text


async def read_body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the body of an answer.

    Raises:
        aiohttp.ClientPayloadError: it has more than `most` bytes.
    """
    if len(body := await _read_beginning(response, most)) > most:
        raise aiohttp.ClientPayloadError(f"more than {most} bytes came")
    return body


async def _read_beginning(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the body of an answer, or more than `most` bytes of it if it is longer."""
    body = bytearray()
    while len(body) <= most and (part := await response.content.readany()):
        body += part
    return bytes(body)


def beginning(text: bytes) -> str:
    """Return what errors show of an answer."""
    return text[:_SHOWN].decode(errors="replace")
