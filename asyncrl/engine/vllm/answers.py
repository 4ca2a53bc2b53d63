"""Requests to vLLM 0.32 for tokens, and its answers, in the form in which the client reads those of SGLang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from asyncrl.engine.answer import Answer, Finish, Member, Meta, VersionSpan
from asyncrl.engine.errors import EngineRefused, RequestFailed, fault_of

_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_CUTS = ("top_p", "top_k", "min_p")
_NONE = -9999.0  # vLLM's log-prob of a token that has none
_PREFIX = "generate-tokens-"  # vLLM's name of a request begins with this
_SEEDS = 1 << 63


class _Candidate(msgspec.Struct):
    token_id: int
    logprob: float | None = None
    rank: int | None = None


class _Token(_Candidate):
    top_logprobs: list[_Candidate] = []


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[VersionSpan] | None = None  # of all tokens of the answer; in the last event of a stream
    logprobs: _Logprobs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class Event(msgspec.Struct):
    """An answer, or one event of its stream; the event after the last token has no choice."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode: Callable[[bytes], Event] = msgspec.json.Decoder(Event).decode


def server_id(rid: str) -> str:
    """Return vLLM's name of a request, by which alone the request can be aborted."""
    return _PREFIX + rid


def request_body(member: Member, *, streamed: bool) -> dict[str, Any]:
    """Return the body of a request.

    Raises:
        EngineRefused: vLLM would return log-probs of another distribution than the trainer computes.
    """
    given = {_NAMES.get(name, name): value for name, value in member.sampling.items() if name != "stream_interval"}
    if cuts := [name for name in _CUTS if name in given]:
        raise EngineRefused(
            f"the request has {', '.join(cuts)}, and vLLM returns log-probs of the tokens that these leave; expected "
            "requests that sample from all tokens: set top_p = 1, top_k = -1, min_p = 0"
        )
    if "seed" in given:  # vLLM begins with the seed at each request: a continued answer would repeat its draws
        given["seed"] = (given["seed"] + len(member.input_ids)) % _SEEDS
    if "json_schema" in given:
        given["structured_outputs"] = {"json": given.pop("json_schema")}
    # vLLM counts the sampled token among the likeliest.
    given |= {"logprobs": member.top + 1 if member.top else 0, "detokenize": bool(given.get("stop"))}
    body = {"request_id": member.rid, "token_ids": member.input_ids, "sampling_params": given, "stream": streamed}
    if streamed:
        body["stream_options"] = {"include_usage": True}
    if member.extra_key:
        body["cache_salt"] = member.extra_key
    if member.adapter:
        body["model"] = member.adapter
    if member.priority:
        body["priority"] = -member.priority  # the lowest is the first
    return body


def read_event(raw: bytes) -> Event:
    """Read an event.

    Raises:
        EngineError: the event tells a fault, or that the engine ended the generation because of one.
        ValueError: it is no event.
    """
    event = _decode(raw)
    if event.error is not None:
        raise fault_of(event.error.code if isinstance(event.error.code, int) else 500, event.error.message)
    if any(choice.finish_reason == "error" for choice in event.choices):
        raise RequestFailed("vLLM ended the generation because of a fault; its log has the reason")
    return event


def joined(events: Sequence[Event], have: int, top: int, version: str = "") -> Answer:
    """Return some events as one answer.

    Args:
        have: tokens of the events before.
        top: how many of the likeliest tokens were asked for.
        version: of the weights of all these tokens; "" where the last event has the versions.
    """
    choices = [choice for event in events for choice in event.choices]
    ids = [token for choice in choices for token in choice.token_ids or ()]
    tokens = [token for choice in choices if choice.logprobs is not None for token in choice.logprobs.content or ()]
    finish = next((choice.finish_reason for choice in choices if choice.finish_reason), None)
    spans = next((choice.weight_versions for choice in choices if choice.weight_versions), [])
    details = [event.usage.prompt_tokens_details for event in events if event.usage is not None]
    meta = Meta(
        finish_reason=Finish(finish) if finish else None,
        completion_tokens=have + len(ids),
        weight_version=version,
        weight_versions=[] if version else spans,
        output_token_logprobs=[(_known(token.logprob), token.token_id, None) for token in tokens],
        output_top_logprobs=[_likeliest(token, top) for token in tokens] if top else None,
        cached_tokens=next((one.cached_tokens for one in details if one is not None), None),
    )
    return Answer(output_ids=ids, meta_info=meta)


def _known(logprob: float | None) -> float | None:
    return logprob if logprob is not None and logprob > _NONE else None


def _likeliest(token: _Token, top: int) -> list[tuple[float | None, int, str | None]]:
    """Return the likeliest tokens in the place of a token, in falling order: vLLM puts the sampled one first."""
    ranked = [(one.rank, one.token_id, one) for one in token.top_logprobs if one.rank is not None and one.rank <= top]
    return [(_known(one.logprob), token_id, None) for _, token_id, one in sorted(ranked, key=lambda each: each[:2])]
