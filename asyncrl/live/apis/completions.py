"""OpenAI completions, `/v1/completions`: a prompt of text or tokens that no chat template writes."""

from __future__ import annotations

from typing import Any

from asyncrl.live.apis.body import Body, kind_of, refusal
from asyncrl.live.apis.openai import (
    MOST_CHOICES,
    SAMPLING,
    ChunkEvents,
    openai_error,
    prompt_ids,
    reply_ids,
    sampling_of,
    token_ids,
    usage_of,
    wants_usage,
)
from asyncrl.live.apis.schema import Call, Ending, Events, LiveError, Opening, Request

READ = (
    *("model", "prompt", "max_tokens", "stream", "stream_options", "logprobs", "n", "user", "add_special_tokens"),
    *SAMPLING,
)
IGNORED = ("metadata", "service_tier")
_NEUTRAL: dict[str, tuple[Any, ...]] = {"echo": (False,), "suffix": ("",), "best_of": (1,)}
_MOST_TOP = 20
_MOST_IDS = 2**20  # of a prompt


class Completions:
    """See `Api`."""

    path = "/v1/completions"

    def parse(self, body: bytes) -> Request:
        fields = Body(body)
        fields.only(READ, IGNORED, _NEUTRAL)
        top = fields.count("logprobs", least=0, most=_MOST_TOP)
        return Request(
            fields.text("model"),
            [],
            fields.count("max_tokens"),
            **sampling_of(fields),
            stream=fields.flag("stream"),
            user=fields.named("user"),
            usage=wants_usage(fields.get("stream_options")),
            logprobs=top is not None,
            top_logprobs=top or 0,
            raw=prompt_of(fields),
            special=fields.flag("add_special_tokens", absent=True),
            choices=fields.count("n", most=MOST_CHOICES) or 1,
        )

    def whole(self, opening: Opening, request: Request, endings: list[Ending]) -> dict[str, Any]:
        choices = [
            _choice(number, ending.text, _logprobs(ending), ending.finish) | prompt_ids(opening) | reply_ids(ending)
            for number, ending in enumerate(endings)
        ]
        return {**_head(opening), "choices": choices, "usage": usage_of(opening, endings)}

    def events(self, opening: Opening, request: Request, choice: int = 0) -> Events:
        return _CompletionEvents(_head(opening), opening, choice, usage=request.usage)

    def error(self, error: LiveError, turn: str) -> tuple[int, dict[str, Any]]:
        return openai_error(error)


class _CompletionEvents(ChunkEvents):
    """See `Events`."""

    def begin(self) -> bytes:
        return self._chunk(_choice(self._choice, "") | ({} if self._choice else prompt_ids(self._opening)))

    def text(self, delta: str) -> bytes:
        return self._chunk(_choice(self._choice, delta))

    def call(self, call: Call) -> bytes:
        return b""  # without tools there is none

    def thought(self, delta: str) -> bytes:
        return b""  # it is part of the text

    def alive(self) -> bytes:
        return self.text("")

    def end(self, ending: Ending) -> bytes:
        return self._chunk(_choice(self._choice, "", _logprobs(ending), ending.finish) | reply_ids(ending))


def prompt_of(fields: Body) -> str | list[int]:
    """Return the one prompt of a request: text, or token ids.

    Raises:
        LiveError: it is absent or empty, or there are several.
    """
    given = fields.get("prompt")
    if isinstance(given, list) and given and not isinstance(given[0], int):
        if len(given) > 1:
            raise refusal("prompt", f"has {len(given)} prompts; send one in each request")
        given = given[0]
    if isinstance(given, list) and given:
        return token_ids(given, "prompt", most=_MOST_IDS)
    if not isinstance(given, str) or not given:
        words = "absent" if given is None else f"{kind_of(given)}{'' if given else ' that is empty'}"
        raise refusal("prompt", f"is {words}; expected a text, or a list of token ids")
    return given


def _choice(
    number: int, text: str, logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(ending: Ending) -> dict[str, Any] | None:
    """Return the log-probs of the reply's tokens, in four lists."""
    if ending.sampled is None:
        return None
    offsets, place = [], 0
    for token in ending.sampled:
        offsets.append(place)
        place += len(token.text)
    return {
        "tokens": [token.text for token in ending.sampled],
        "token_logprobs": [token.logprob for token in ending.sampled],
        "top_logprobs": [dict(token.top) for token in ending.sampled],
        "text_offset": offsets,
    }


def _head(opening: Opening) -> dict[str, Any]:
    return {
        "id": f"cmpl-{opening.turn}",
        "object": "text_completion",
        "created": opening.created,
        "model": opening.model,
    }
