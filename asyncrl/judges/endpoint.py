"""A judge at an OpenAI-compatible chat endpoint."""

from __future__ import annotations

from functools import partial

import msgspec

from asyncrl.http_calls import NoAnswer, Refused, answered, beginning, open_session, post
from asyncrl.judges.protocol import Case, Vote, VoteFailed
from asyncrl.judges.quoting import question_of, read_vote

_ANSWER_BYTES = 1 << 20


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class EndpointJudge:
    """Asks `URL/chat/completions`. Transient faults (no connection, status 429 or 5xx) are tried again until the
    deadline of the vote; any other status fails it at once.
    """

    def __init__(
        self, url: str, model: str, *, key: str = "", deadline_s: float, temperature: float, most_tokens: int
    ) -> None:
        self.name = f"endpoint:{model}"
        self._url = f"{url.rstrip('/')}/chat/completions"  # it is given up to and with `/v1`
        self._options = {"model": model, "temperature": temperature, "max_tokens": most_tokens}
        self._deadline_s = deadline_s
        self._session = open_session({"Authorization": f"Bearer {key}"} if key else None)

    async def vote(self, case: Case) -> Vote:
        """Ask the endpoint, again if that may help."""
        question = question_of(case)
        body = msgspec.json.encode(self._options | {"messages": question.messages})
        try:
            text = await answered(partial(self._ask, body), self._deadline_s)
        except NoAnswer as error:
            words = f"no vote from {self._url} within {self._deadline_s:g} s"
            raise VoteFailed(words, f"; last: {error}") from None
        return read_vote(text, question.mark)

    async def _ask(self, body: bytes) -> str:
        try:
            text = await post(self._session, self._url, body, _ANSWER_BYTES)
        except Refused as error:
            raise VoteFailed(f"{self._url} refused", f": {error}") from None
        try:
            return msgspec.json.decode(text, type=_Answer).choices[0].message.content
        except (ValueError, IndexError, RecursionError) as error:  # bytes that are no text among them
            raise VoteFailed(f"{self._url} answered no chat completion", f" ({error}): {beginning(text)}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()
