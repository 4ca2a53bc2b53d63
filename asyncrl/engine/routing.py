"""Experts that engines return, kept with the tokens that they were chosen for.

A row belongs to a token that was fed, and holds the experts of every layer: the last token of a request has none. Each
token keeps the first row that was recorded for it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.answer import Generation
from asyncrl.engine.errors import EngineRefused
from topics.payload_refs import Experts
from topics.trajectories import Answer

log = structlog.get_logger()


def unrecorded(answer: Answer, prompt: int) -> int:
    """Return the first token of a request that has no row yet: engines return those from there."""
    return 0 if answer.routing is None else min(answer.routing.end, prompt - 1)


def keep_routing(answer: Answer, generation: Generation, *, prompt: int, had: int, model: ModelInfo) -> None:
    """Take over the rows of a request that ended, those of tokens that have none yet.

    Tokens that were known before this request and have no row were sampled by a request without rows: their rows are
    lost, and the rows of this request, which only read them, do not replace them.

    Args:
        answer: with the tokens of the request.
        generation: how the request ended.
        prompt: tokens before the answer.
        had: tokens of the answer before the request.
        model: the trained one; an expert takes two bytes if there are more than 256.

    Raises:
        EngineRefused: there is not a row for each token that was fed, or not of this model.
    """
    first, kind = generation.routed_from, np.dtype("<u2" if model.experts > 256 else "u1")
    fed = prompt + had + len(generation.token_ids) - 1
    routed = np.empty(0, np.int32) if generation.routed is None else generation.routed
    if answer.routing is not None and len(routed) == fed * (each := answer.routing.width // kind.itemsize):
        routed = routed[first * each :]  # some builds of SGLang return all rows, wherever they were asked to begin
    wanted = fed - first
    if wanted <= 0 or not len(routed) or len(routed) % wanted:
        raise EngineRefused(
            f"an engine returned {len(routed)} routed experts for {wanted} tokens, expected as many for each; start "
            "SGLang with --enable-return-routed-experts, or set learner.routing to own"
        )
    if (experts := len(routed) // wanted) % model.layers:
        raise EngineRefused(
            f"an engine returned {experts} experts of a token, expected as many for each of {model.layers} layers; "
            "it serves another model than is trained"
        )
    rows = routed.reshape(wanted, -1).astype(kind).view(np.uint8)
    known = answer.routing or Experts(rows.shape[1])
    if known.width != rows.shape[1]:
        raise EngineRefused(
            f"an engine returned {rows.shape[1]} bytes of experts of a token, expected {known.width} as in the request "
            "before; engines serve different models"
        )
    end = known.end
    taken = rows[end - first :]
    taken[max(0, prompt - 1 - end) : max(0, prompt - 1 + had - end)] = 0
    answer.routing = msgspec.structs.replace(known, rows=known.rows + taken.tobytes())


def keep_if_there(
    answer: Answer, generation: Generation, *, prompt: int, had: int, model: ModelInfo, count: Callable[[str], None]
) -> None:
    """Take over rows as `keep_routing` does; an answer with missing or wrong rows continues without any.

    Args:
        count: counts what went wrong.
    """
    try:
        keep_routing(answer, generation, prompt=prompt, had=had, model=model)
    except EngineRefused as error:
        count("routing_refused")
        log.warning("experts not recorded", reason=str(error))
        answer.routing = None


def rows_of(experts: Experts) -> npt.NDArray[np.uint8]:
    """Return the rows of an answer, [N, B]."""
    return np.frombuffer(experts.rows, np.uint8).reshape(-1, experts.width)
