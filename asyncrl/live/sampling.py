"""How engines sample the reply to a request."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.engine.client import SamplingParams
from asyncrl.live.apis.schema import Request
from asyncrl.live.tools import ToolFormat

_LEAST_TOP_P = 1e-6  # engines refuse 0, which asks for the likeliest token; this value has the same effect


def sampling_of(
    request: Request, form: ToolFormat | None, stops: Sequence[int], *, most: int, choice: int
) -> SamplingParams:
    """Return how the reply to a request is sampled.

    Args:
        form: of calls of tools; None: the reply has none.
        stops: tokens of the model that end a reply, besides its end-of-sequence tokens.
        most: tokens of a reply whose request names no limit.
        choice: number of the reply among those to the request.
    """
    last_call = [form.closer] if form is not None and form.closer and not request.parallel else []
    return SamplingParams(
        max_new_tokens=request.max_tokens or most,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else max(request.top_p, _LEAST_TOP_P),
        top_k=request.top_k or -1,
        min_p=request.min_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        stop=[*request.stop, *last_call],
        stop_token_ids=[*dict.fromkeys([*stops, *request.stop_ids])],
        # Each reply has its own, from 0 as those of rollouts are.
        seed=None if request.seed is None else (request.seed ^ choice) % 2**63,
        top=request.top_logprobs,
        schema=request.schema,
    )
