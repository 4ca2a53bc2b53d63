"""Log-probs of sampled tokens as OpenAI's two APIs have them."""

from __future__ import annotations

from typing import Any

from asyncrl.live.apis.body import Body, refusal
from asyncrl.live.apis.words import Ending

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
    """Return one object for each token; none where nobody asked."""
    return [
        _one(sampled.text, sampled.logprob) | {"top_logprobs": [_one(*likely) for likely in sampled.top]}
        for sampled in ending.sampled or []
    ]


def _one(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": [*token.encode()]}
