"""Log-probs that a server's model gives to tokens which are there already."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from asyncrl.engine.client import EngineClient
from asyncrl.engine.errors import EngineError, RequestFailed, message_of
from topics.values import checked_logprobs
from topics.wire import Float32Array, Int32Array

_Token: TypeAlias = tuple[float | None, int, Any]  # log-prob, id, text


class Scores(NamedTuple):
    """Log-probs of T tokens at temperature 1, 0 up to the place from which they were asked for."""

    logprobs: Float32Array  # [T]
    top: Float32Array  # [T, K, 2] of the K likeliest tokens of each place: id and log-prob


class _Meta(msgspec.Struct):
    input_token_logprobs: list[_Token]
    input_top_logprobs: list[list[_Token] | None] = []


class _Answer(msgspec.Struct):
    meta_info: _Meta


class Denied(EngineError):
    """The server takes no such call here, or not with this key: asking again does not help."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"HTTP {status}: {words}")
        self.status = status


class ScoringClient(EngineClient):
    """Asks a server for log-probs of prompts.

    Raises:
        Denied: it answered 401, 403 or 404.
    """

    def _fault(self, status: int, raw: bytes) -> EngineError:
        fault = super()._fault(status, raw)
        return Denied(status, message_of(raw)) if status in (401, 403, 404) else fault

    async def score(self, tokens: Int32Array, start: int, top: int) -> Scores:
        """Log-probs of the tokens after position `start`, [T], each given all earlier tokens.

        Args:
            tokens: [T] ids.
            top: how many of the likeliest tokens of each place, too.

        Raises:
            EngineError: see `EngineClient`.
        """
        body = {
            "input_ids": tokens.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start,
            "top_logprobs_num": top,
        }
        meta = self._decode(await self._call("POST", "/generate", body), _Answer).meta_info
        count = len(tokens) - start - 1
        given = meta.input_token_logprobs[-count:] if count else []
        places = [place or [] for place in meta.input_top_logprobs[-count:]] if top and count else [[]] * count
        if [token for _, token, _ in given] != tokens[start + 1 :].tolist():
            raise RequestFailed(f"log-probs of {len(given)} tokens that are not the {count} asked for")
        if [len(place) for place in places] != [top] * count:
            raise RequestFailed(f"no {top} likeliest tokens for each of {count}")
        found = Scores(np.zeros(len(tokens), np.float32), np.zeros((len(tokens), top, 2), np.float32))
        if count:
            found.logprobs[start + 1 :] = _finite([given])[0, :, 1]
        if count and top:
            found.top[start + 1 :] = _finite(places)
        return found


def _finite(places: list[list[_Token]]) -> Float32Array:
    """Id and log-prob of some tokens at each of some places, [places, tokens, 2]."""
    pairs = [[(token, math.nan if value is None else value) for value, token, _ in place] for place in places]
    found = np.array(pairs, np.float32)
    try:
        found[..., 1] = checked_logprobs(found[..., 1].ravel()).reshape(found.shape[:2])
    except ValueError as error:
        raise RequestFailed(str(error)) from error
    return found
