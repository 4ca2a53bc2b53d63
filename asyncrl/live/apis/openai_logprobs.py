"""Log-probs of sampled tokens as OpenAI's two APIs have them."""

from __future__ import annotations

from typing import Any

from asyncrl.live.apis.words import Ending


def token_logprobs(ending: Ending) -> list[dict[str, Any]]:
    """Return one object for each token; none where nobody asked. Other likely tokens are not known here."""
    return [
        {"token": one.text, "logprob": one.logprob, "bytes": [*one.text.encode()], "top_logprobs": []}
        for one in ending.sampled or []
    ]
