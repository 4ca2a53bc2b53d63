"""Log-probs of sampled tokens, and errors, as OpenAI's two APIs have them."""

from __future__ import annotations

from typing import Any

from asyncrl.live.apis.body import Body, refusal
from asyncrl.live.apis.schema import Ending, Fault, LiveError

_MOST_TOP = 20


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
