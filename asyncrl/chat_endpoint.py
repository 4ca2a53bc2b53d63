"""A client of servers with `/chat/completions` of OpenAI's API."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from asyncrl.errors import AsyncRLError
from asyncrl.http_calls import NoAnswer, Refused, answered, beginning, open_session, post

_ANSWER_BYTES = 1 << 20


class AskFailed(AsyncRLError):
    """A question without an answer."""

    def __init__(self, reason: str, detail: str) -> None:
        """
        Args:
            reason: without any client text, because logs contain it.
            detail: what follows it in the error, which may quote an answer.
        """
        super().__init__(reason + detail)
        self.reason, self.detail = reason, detail


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class ChatEndpoint:
    """Asks `URL/chat/completions`. Transient faults (no connection, status 429 or 5xx) are tried again until the
    deadline of the question; any other status fails it at once.
    """

    def __init__(self, url: str, options: dict[str, Any], *, key: str, deadline_s: float) -> None:
        """
        Args:
            url: up to and with `/v1`.
            options: fields of each request, `model` among them.
        """
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._options, self._deadline_s = options, deadline_s
        self._session = open_session({"Authorization": f"Bearer {key}"} if key else None)

    async def ask(self, messages: list[dict[str, Any]]) -> str:
        """Return the answer to messages with role and content.

        Raises:
            AskFailed: there is none.
        """
        body = msgspec.json.encode(self._options | {"messages": messages})
        try:
            return await answered(partial(self._ask, body), self._deadline_s)
        except NoAnswer as error:
            words = f"no answer from {self._url} within {self._deadline_s:g} s"
            raise AskFailed(words, f"; last: {error}") from None

    async def _ask(self, body: bytes) -> str:
        try:
            text = await post(self._session, self._url, body, _ANSWER_BYTES)
        except Refused as error:
            raise AskFailed(f"{self._url} refused", f": {error}") from None
        try:
            return msgspec.json.decode(text, type=_Answer).choices[0].message.content
        except (ValueError, IndexError, RecursionError) as error:  # bytes that are no text among them
            raise AskFailed(f"{self._url} answered no chat completion", f" ({error}): {beginning(text)}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()
