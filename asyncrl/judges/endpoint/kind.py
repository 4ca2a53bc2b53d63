"""The kind of judges at a chat endpoint."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.addresses import is_address
from asyncrl.config.finding import Finding
from asyncrl.config.live_settings import JudgeKind, JudgeSettings


class Endpoint(JudgeKind):
    """An OpenAI-compatible chat endpoint."""

    keys = ("url", "model", "api_key_file", "temperature", "max_new_tokens")
    opener = "asyncrl.judges.endpoint.judge:open_judge"

    def checks(self, judge: JudgeSettings) -> Iterator[Finding]:
        if not is_address(judge.url, "http", "https"):
            yield Finding(("live.judge.url",), f'found "{judge.url}", expected http://host:port/v1')
        if not judge.model:
            yield Finding(("live.judge.model",), "is empty; name the model that the endpoint shall judge with")


KIND = Endpoint()
