"""A judge at an OpenAI-compatible chat endpoint."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.addresses import is_address
from asyncrl.chat_endpoint import AskFailed, ChatEndpoint
from asyncrl.config.finding import Finding
from asyncrl.config.live_settings import JudgeKind, JudgeSettings
from asyncrl.judges.protocol import Case, JudgeParts, Vote, VoteFailed
from asyncrl.judges.quoting import question_of, read_vote


class EndpointJudge:
    """Votes by asking a `ChatEndpoint`."""

    def __init__(
        self, url: str, model: str, *, key: str = "", deadline_s: float, temperature: float, most_tokens: int
    ) -> None:
        self.name = f"endpoint:{model}"
        options = {"model": model, "temperature": temperature, "max_tokens": most_tokens}
        self._endpoint = ChatEndpoint(url, options, key=key, deadline_s=deadline_s)

    async def vote(self, case: Case) -> Vote:
        """Ask the endpoint, again if that may help."""
        question = question_of(case)
        try:
            answer = await self._endpoint.ask(question.messages)
        except AskFailed as error:
            raise VoteFailed(error.reason, error.detail) from error
        return read_vote(answer, question.mark)

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()


async def open_judge(parts: JudgeParts) -> EndpointJudge:
    """Open the endpoint of the settings."""
    settings, file = parts.settings, parts.base / parts.settings.api_key_file
    return EndpointJudge(
        settings.url,
        settings.model,
        key=file.read_text(encoding="utf-8").strip() if settings.api_key_file else "",
        deadline_s=settings.deadline_s,
        temperature=settings.temperature,
        most_tokens=settings.max_new_tokens,
    )


class Endpoint(JudgeKind):
    """An OpenAI-compatible chat endpoint."""

    keys = ("url", "model", "api_key_file", "temperature", "max_new_tokens")
    opener = "asyncrl.judges.endpoint:open_judge"

    def checks(self, judge: JudgeSettings) -> Iterator[Finding]:
        if not is_address(judge.url, "http", "https"):
            yield Finding(("live.judge.url",), f'found "{judge.url}", expected http://host:port/v1')
        if not judge.model:
            yield Finding(("live.judge.model",), "is empty; name the model that the endpoint shall judge with")


KIND = Endpoint()
