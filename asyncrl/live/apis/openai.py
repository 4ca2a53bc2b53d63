"""What OpenAI's APIs have in common: fields of sampling and reasoning, log-probs, token ids, usage, chunks, errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.live.apis.body import Body, refusal, shown
from asyncrl.live.apis.schema import Ending, Fault, LiveError, Opening, event

MOST_CHOICES = 16
_MOST_TOP = 20
_MOST_VARIABLES = 2**14  # bytes of them as JSON
UNTHOUGHT = {"enable_thinking": False, "thinking": False}
"""Variables by which chat templates write that a reply has no reasoning; a template ignores unknown ones."""


def top_of(fields: Body, *, reported: bool) -> int:
    """Return of how many likely tokens in each place the log-probs are wanted.

    Args:
        reported: those of the sampled tokens are.

    Raises:
        LiveError: it is no such number, or asked for without the others.
    """
    top = fields.count("top_logprobs", least=0, most=_MOST_TOP) or 0
    if top and not reported:
        raise refusal(
            "top_logprobs", f"is {top}, and the log-probs of the sampled tokens are not asked for: ask for both"
        )
    return top


def token_logprobs(ending: Ending) -> list[dict[str, Any]]:
    """Return one object for each token; empty if none were requested."""
    return [
        _one(sampled.text, sampled.logprob) | {"top_logprobs": [_one(*likely) for likely in sampled.top]}
        for sampled in ending.sampled or []
    ]


def _one(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": [*token.encode()]}


SAMPLING = (
    *("top_k", "min_p", "repetition_penalty", "logit_bias", "stop_token_ids", "return_token_ids"),
    *("frequency_penalty", "presence_penalty", "stop", "seed", "temperature", "top_p"),
)
"""Fields by which chat completions and completions say how a reply is sampled; the first six as vLLM names them."""
_MOST_BIASES, _MOST_STOPS = 1024, 64


def sampling_of(fields: Body) -> dict[str, Any]:
    """Return the fields of a `Request` that say how its reply is sampled.

    Raises:
        LiveError: one of them is malformed.
    """
    scale = fields.real("repetition_penalty", 0.01, 10.0)
    return {
        "temperature": fields.real("temperature", 0.0, 2.0),
        "top_p": fields.real("top_p", 0.0, 1.0),
        "top_k": max(0, fields.count("top_k", least=-1) or 0) or None,
        "min_p": fields.real("min_p", 0.0, 1.0) or 0.0,
        "frequency_penalty": fields.real("frequency_penalty", -2.0, 2.0) or 0.0,
        "presence_penalty": fields.real("presence_penalty", -2.0, 2.0) or 0.0,
        "repetition_penalty": 1.0 if scale is None else scale,
        "logit_bias": _biases(fields),
        "stop": fields.stops("stop"),
        "stop_ids": token_ids(fields.get("stop_token_ids") or [], "stop_token_ids", most=_MOST_STOPS),
        "seed": fields.count("seed", least=-(2**63), most=2**63 - 1),
        "token_ids": fields.flag("return_token_ids"),
    }


def token_ids(given: Any, name: str, *, most: int) -> list[int]:
    """Check a list of token ids, and return it.

    Raises:
        LiveError: it is no such list, or a longer one.
    """
    if not isinstance(given, list) or not all(type(one) is int and 0 <= one < 2**31 for one in given):
        raise refusal(name, f"is {shown(given)}; expected a list of token ids")
    if len(given) > most:
        raise refusal(name, f"has {len(given)} entries; at most {most} are taken")
    return given


def _biases(fields: Body) -> dict[str, float]:
    given = fields.get("logit_bias") or {}
    numbers = isinstance(given, dict) and all(
        token.isdecimal() and token.isascii() and type(bias) in (int, float) and -100 <= bias <= 100
        for token, bias in given.items()
    )
    if not numbers or len(given) > _MOST_BIASES:
        words = f"expected at most {_MOST_BIASES} token ids with numbers from -100 to 100"
        raise refusal("logit_bias", f"is {shown(given)}; {words}")
    return {token: float(bias) for token, bias in given.items() if bias}


def reasoning_of(fields: Body, effort: Any, name: str) -> tuple[bool, dict[str, Any]]:
    """Return whether a reply may begin with reasoning, and the variables of the chat template.

    Args:
        effort: as the request gives it; "none" asks for no reasoning.
        name: of the field with the effort.

    Raises:
        LiveError: `chat_template_kwargs` or the effort is malformed.
    """
    given = fields.get("chat_template_kwargs") or {}
    if not isinstance(given, dict) or len(msgspec.json.encode(given)) > _MOST_VARIABLES:
        raise refusal(
            "chat_template_kwargs", f"is {shown(given)}; expected an object of at most {_MOST_VARIABLES:,} bytes"
        )
    if effort is not None and not isinstance(effort, str):
        raise refusal(name, f"is {shown(effort)}; expected a text, such as low or none")
    if effort == "none":
        return False, {**given, **UNTHOUGHT}
    return True, {**given, **({"reasoning_effort": effort} if effort else {})}


def prompt_ids(opening: Opening) -> dict[str, Any]:
    """Return the field with the tokens of the prompt; none where they were not asked for."""
    return {} if opening.prompt_ids is None else {"prompt_token_ids": opening.prompt_ids}


def reply_ids(ending: Ending) -> dict[str, Any]:
    """Return the field with the tokens of a reply; none where they were not asked for."""
    return {} if ending.ids is None else {"token_ids": ending.ids}


def usage_of(opening: Opening, endings: list[Ending]) -> dict[str, Any]:
    """Return the tokens of prompt and replies."""
    tokens, thought = (
        sum(counts) for counts in zip(*((one.tokens, one.thought_tokens) for one in endings), strict=True)
    )
    usage = {"prompt_tokens": opening.prompt_tokens, "completion_tokens": tokens}
    details: dict[str, Any] = {"prompt_tokens_details": {"cached_tokens": endings[0].cached}}
    details |= {"completion_tokens_details": {"reasoning_tokens": thought}} if thought else {}
    return usage | {"total_tokens": opening.prompt_tokens + tokens} | details


class ChunkEvents:
    """`Events` of chat completions and of completions: one chunk for each event."""

    response: dict[str, Any] | None = None

    def __init__(self, head: dict[str, Any], opening: Opening, choice: int, *, usage: bool) -> None:
        """
        Args:
            head: fields that each chunk begins with.
        """
        self._head, self._opening, self._choice, self._usage = head, opening, choice, usage

    def done(self, endings: list[Ending]) -> bytes:
        usage = self._head | {"choices": [], "usage": usage_of(self._opening, endings)}
        return (event(usage) if self._usage else b"") + b"data: [DONE]\n\n"

    def fail(self, error: LiveError) -> bytes:
        return event(openai_error(error)[1])

    def _chunk(self, choice: dict[str, Any], top: Mapping[str, Any] = {}) -> bytes:
        return event({**self._head, **top, "choices": [choice], **({"usage": None} if self._usage else {})})


def wants_usage(options: Any) -> bool:
    """Return whether a stream reports its tokens.

    Raises:
        LiveError: `stream_options` is malformed.
    """
    if options is None:
        return False
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise refusal("stream_options", 'is not understood; expected {"include_usage": true or false}')
    return bool(options.get("include_usage", False))


_STATUS: dict[Fault, tuple[int, str, str | None]] = {  # with type and code
    "invalid": (400, "invalid_request_error", None),
    "key": (401, "invalid_request_error", "invalid_api_key"),
    "forbidden": (403, "invalid_request_error", None),
    "absent": (404, "invalid_request_error", "model_not_found"),
    "large": (413, "invalid_request_error", None),
    "limited": (429, "rate_limit_error", "rate_limit_exceeded"),
    "internal": (500, "server_error", None),
    "overloaded": (503, "server_error", None),
}


def openai_error(error: LiveError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of a refusal."""
    status, kind, code = _STATUS[error.fault]
    if code == "model_not_found" and error.field != "model":
        code = "not_found"
    return status, {"error": {"message": str(error), "type": kind, "param": error.field, "code": error.code or code}}
