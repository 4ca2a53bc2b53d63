"""Rewards over HTTP."""

from __future__ import annotations

from functools import partial

import msgspec

from asyncrl.child_pool.frames import CallFailed
from asyncrl.http_calls import NoAnswer, Refused, answered, beginning, open_session, post
from asyncrl.rewards.graders import GradeResult
from asyncrl.rewards.score import GradeRequest, read_score

_ANSWER_BYTES = 1 << 20


async def open_server(url: str, *, time_limit_s: float, **_limits: object) -> HttpGrader:
    """Open the connections to a server."""
    return HttpGrader(url, time_limit_s)


class HttpGrader:
    """The number that a server answers.

    It gets `{"prompt", "completion", "label", "metadata"}` as JSON by POST and answers a number, or an object with
    "reward" and further numbers. Transient faults (no connection, status 429 or 5xx) are retried, after 0.1 s and then
    twice as long each time up to 5 s, until the time limit.
    """

    at_once = 1 << 20  # the worker bounds the number of calls

    def __init__(self, url: str, time_limit_s: float) -> None:
        self._url = url
        self._time_limit_s = time_limit_s
        self._session = open_session()

    async def grade(self, request: GradeRequest) -> GradeResult:
        """Ask the server, again if that may help."""
        fields = ("prompt", "completion", "label", "metadata")
        body = msgspec.json.encode({name: getattr(request, name) for name in fields})
        try:
            return await answered(partial(self._ask, body), self._time_limit_s)
        except NoAnswer as error:
            detail = f"no reward from {self._url} within {self._time_limit_s:g} s; last: {error}"
            raise CallFailed("time_limit", detail) from None

    async def _ask(self, body: bytes) -> GradeResult:
        try:
            text = await post(self._session, self._url, body, _ANSWER_BYTES)
        except Refused as error:
            raise CallFailed("http", str(error)) from None
        if len(text) > _ANSWER_BYTES:
            raise CallFailed("value", f"{self._url} answered more than {_ANSWER_BYTES} bytes: {beginning(text)}")
        try:
            return GradeResult(*read_score(msgspec.json.decode(text)))
        except (ValueError, RecursionError) as error:
            raise CallFailed("value", f"{self._url} answered no JSON ({error}): {beginning(text)}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()
