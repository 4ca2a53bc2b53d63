"""Rewards: what turns a completion into a number."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Protocol

import aiohttp
import msgspec

from asyncrl.errors import AsyncRLError
from asyncrl.rewards.score import GradeRequest, RewardFailed, read_score
from asyncrl.rewards.serving import reward_setup
from asyncrl.sandbox.pool import Sandbox

__all__ = ["GradeRequest", "GradeResult", "Grader", "GraderError", "RewardFailed", "open_grader"]

_FIRST_WAIT_S, _LAST_WAIT_S = 0.1, 5.0
_SHOWN_CHARS = 300
_ANSWER_BYTES = 1 << 20


class GraderError(AsyncRLError):
    """A reward that no grader is known for."""

    fatal = True


class GradeResult(msgspec.Struct):
    """The reward of one trajectory."""

    reward: float
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class Grader(Protocol):
    """Grades completions, many at a time."""

    at_once: int  # requests that do not wait for each other

    async def grade(self, request: GradeRequest) -> GradeResult:
        """Grade one completion.

        Raises:
            RewardFailed: states why this one has no reward; others in flight are not touched.
        """
        ...

    async def close(self) -> None:
        """End what was started for grading."""
        ...


async def open_grader(
    spec: str, *, base: Path, workers: int = 1, time_limit_s: float = 30.0, memory_mb: int = 0
) -> Grader:
    """Open the reward that `spec` names.

    Args:
        spec: `exact` (completion equals label, both stripped), `math` (by math-verify), `reasoning-gym` (the scorer
            of the dataset that the prompt came from) or `reasoning-gym:NAME`, `http://...` or `https://...`, or a
            user's function as `path/to/file.py:function` or `package.module:function`.
        base: folder that a relative path is looked for in.
        workers: child processes that run functions.
        time_limit_s: seconds that one request may take from the beginning of its turn, retries included.
        memory_mb: MB that each process of a function may take; 0 for no limit.

    Raises:
        GraderError: unknown reward.
        FunctionError: the user's function cannot be found or loaded.
    """
    if spec == "exact":
        return ExactGrader()
    if spec.startswith(("http:", "https:")):
        return HttpGrader(spec, time_limit_s)
    setup = reward_setup(spec, base=base, time_limit_s=time_limit_s, memory_mb=memory_mb)
    if setup is None:
        known = "exact, math, reasoning-gym, reasoning-gym:NAME, http://ADDRESS, FILE.py:FUNCTION, MODULE:FUNCTION"
        raise GraderError(f"unknown reward {spec!r}; known are {known}")
    return SandboxGrader(await Sandbox.open(setup, workers=workers))


class ExactGrader:
    """1.0 where completion and label are equal but for white space around them, else 0.0."""

    at_once = 1

    async def grade(self, request: GradeRequest) -> GradeResult:
        """Compare; it cannot hang and runs where it is called."""
        return GradeResult(float(request.completion.strip() == str(request.label).strip()))

    async def close(self) -> None:
        """Nothing was started."""


class SandboxGrader:
    """The number that a function in a child process returns."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.at_once = sandbox.at_once
        self._sandbox = sandbox

    async def grade(self, request: GradeRequest) -> GradeResult:
        """Run the function in a child."""
        reply = await self._sandbox.call(request)
        if reply.reason is not None:
            raise RewardFailed(reply.reason, reply.detail)
        return GradeResult(*reply.value)

    async def close(self) -> None:
        """Kill the children."""
        await self._sandbox.close()


class HttpGrader:
    """The number that a server answers.

    It gets `{"prompt", "completion", "label", "metadata"}` as JSON by POST and answers a number, or an object with
    "reward" and further numbers. Transient faults (no connection, status 429 or 5xx) are retried, after 0.1 s and then
    twice as long each time up to 5 s, until the time limit.
    """

    at_once = 1 << 20  # the worker bounds what is in flight

    def __init__(self, url: str, time_limit_s: float) -> None:
        self._url = url
        self._time_limit_s = time_limit_s
        # A second bound here would count waiting as the server's time.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Content-Type": "application/json"},
        )

    async def grade(self, request: GradeRequest) -> GradeResult:
        """Ask the server, again where that may help."""
        fields = ("prompt", "completion", "label", "metadata")
        body = msgspec.json.encode({name: getattr(request, name) for name in fields})
        fault, wait_s = "no answer", _FIRST_WAIT_S
        try:
            async with asyncio.timeout(self._time_limit_s):
                while True:
                    try:
                        return await self._ask(body)
                    except (aiohttp.ClientError, OSError) as error:
                        fault = str(error) or type(error).__name__
                    await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))  # so that workers do not return together
                    wait_s = min(2 * wait_s, _LAST_WAIT_S)
        except TimeoutError:
            detail = f"no reward from {self._url} within {self._time_limit_s:g} s; last: {fault}"
            raise RewardFailed("time_limit", detail) from None

    async def _ask(self, body: bytes) -> GradeResult:
        # A redirection is not followed: the labels go to the address that the settings name, and to no other.
        async with self._session.post(self._url, data=body, allow_redirects=False) as response:
            text = await _read_answer(response)
            shown = text[:_SHOWN_CHARS].decode(errors="replace")
            if response.status == 429 or response.status >= 500:
                raise aiohttp.ClientError(f"status {response.status}: {shown}")
            if response.status >= 300:
                to = f" and names {response.headers['Location']}" if "Location" in response.headers else ""
                raise RewardFailed("http", f"{self._url} answered status {response.status}{to}: {shown}")
        if len(text) > _ANSWER_BYTES:
            raise RewardFailed("value", f"{self._url} answered more than {_ANSWER_BYTES} bytes: {shown}")
        try:
            return GradeResult(*read_score(msgspec.json.decode(text)))
        except ValueError as error:
            raise RewardFailed("value", f"{self._url} answered no JSON ({error}): {shown}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


async def _read_answer(response: aiohttp.ClientResponse) -> bytes:
    """The body, or its beginning where it is longer than an answer may be."""
    text = b""
    while len(text) <= _ANSWER_BYTES and (part := await response.content.readany()):
        text += part
    return text
