"""A running /generate call: collects what its requests emit and turns it into JSON."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np

from asyncrl.engine.embedded.request import PromptScores, Request, Span
from asyncrl.engine.embedded.scheduler import Engine
from asyncrl.engine.embedded.schema import Asked, GenerateBody
from asyncrl.engine.errors import EngineRefused

_encode = msgspec.json.Encoder().encode


class Call:
    """The requests of one HTTP request. Also their listener, so that one step's events go out in one write."""

    def __init__(self, engine: Engine, body: GenerateBody, asked: list[Asked], *, incremental: bool) -> None:
        self._engine = engine
        self._logprobs = body.return_logprob
        self._incremental = incremental
        self._indices: dict[Request, int] = {}
        self._sent: dict[Request, int] = {}
        self._open = len(asked)
        self._events: list[bytes] = []
        self._batch = len(asked) > 1
        self._woken = asyncio.get_running_loop().create_future()
        self.requests = [self._request(one, body) for one in asked]
        self._routed_from = body.routed_experts_start_len

    def _request(self, asked: Asked, body: GenerateBody) -> Request:
        top = body.top_logprobs_num or 0
        return Request(
            asked.rid,
            asked.prompt,
            asked.sampling,
            extra_key=asked.extra_key,
            priority=body.priority or 0,
            streaming=body.stream,
            listener=self._on_stream if body.stream else self._on_whole,
            scores=PromptScores(body.logprob_start_len or 0, top) if body.scores_prompts else None,
            top=top,
            routed=np.zeros((0, 0, 0), np.int32) if body.return_routed_experts else None,
        )

    def start(self, *, batch: bool) -> None:
        """Submit all requests or, when one is refused, none.

        Raises:
            EngineRefused: a request the engine can never run, or two with the same id.
        """
        self._batch = batch
        if len({request.rid for request in self.requests}) < len(self.requests):
            raise EngineRefused("Duplicate request ID detected within the batch; give every prompt its own rid")
        for request in self.requests:
            self._engine.check(request)
        for index, request in enumerate(self.requests):
            self._indices[request] = index
            self._engine.submit(request)

    def cancel(self) -> None:
        """Abort unfinished requests: the client has left."""
        for request in self.requests:
            if request.finish is None:
                self._engine.abort(request.rid)

    async def whole(self) -> bytes:
        """The JSON answer, when every request has ended."""
        while self._open:
            await self._wait()
        answers = [self._answer(request, 0) for request in self.requests]
        return _encode(answers if self._batch else answers[0])

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events as they come, then `[DONE]`."""
        while True:
            ended = not self._open
            chunk, self._events = b"".join(self._events), []
            if chunk or ended:
                yield chunk + b"data: [DONE]\n\n" if ended else chunk
            if ended:
                return
            if not self._events:
                await self._wait()

    async def _wait(self) -> None:
        self._woken = asyncio.get_running_loop().create_future()
        await self._woken

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)

    def _on_whole(self, request: Request) -> None:
        self._open -= request.finish is not None
        if not self._open:
            self._wake()

    def _on_stream(self, request: Request) -> None:
        self._open -= request.finish is not None
        first = self._sent.get(request, 0) if self._incremental else 0
        self._sent[request] = len(request.tokens)
        answer = self._answer(request, first)
        if self._batch:
            answer["index"] = self._indices[request]
        self._events += (b"data: ", _encode(answer), b"\n\n")
        self._wake()

    def _answer(self, request: Request, first: int) -> dict[str, Any]:
        """An answer or event, with the output tokens from `first` on."""
        tokens = request.tokens[first:] if first else request.tokens
        version, spans = self._versions(request)
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.tokens),
            "cached_tokens": request.cached_tokens,
            "cached_tokens_details": None,
            "reasoning_tokens": 0,
            "weight_version": version,
            "weight_versions": spans,
            "num_retractions": request.retractions,
            "dp_rank": None,
        }
        if request.finish is not None:
            meta["e2e_latency"] = time.perf_counter() - request.submitted_s
            meta["response_sent_to_client_ts"] = time.time()
            if request.routed is not None and request.routed.size:
                meta["routed_experts"] = base64.b64encode(request.routed[self._routed_from :].tobytes()).decode()
        if self._logprobs:
            logprobs = request.logprobs[first:] if first else request.logprobs
            meta |= _prompt_scores(request)
            meta["output_token_logprobs"] = [
                (logprob, token, None) for logprob, token in zip(logprobs, tokens, strict=True)
            ]
            meta["output_token_logprobs_length"] = len(tokens)
            if request.top:
                places = request.top_logprobs[first:]
                meta["output_top_logprobs"] = [[(value, token, None) for value, token in place] for place in places]
        return {"output_ids": tokens, "meta_info": meta}

    def _versions(self, request: Request) -> tuple[str, list[Span]]:
        """The version that sampled the last token (or would sample the first), and the spans over all tokens."""
        spans, count = request.spans, len(request.tokens)
        start = spans[-1].end if spans else 0
        if start == count and spans:
            return spans[-1].version, spans
        version = self._engine.weight_version
        return version, [*spans, Span(version, start, count)] if count else []


def _prompt_scores(request: Request) -> dict[str, Any]:
    """Log-probs of the prompt, in SGLang's form: the first place has none."""
    scores = request.scores
    if scores is None:
        return {"input_token_logprobs": []}
    known = scores.logprobs if scores.start < len(request.prompt) else []
    pairs = zip([None, *known], request.prompt[scores.start :], strict=False)
    found: dict[str, Any] = {"input_token_logprobs": [(logprob, token, None) for logprob, token in pairs]}
    if scores.top:
        places = [[(logprob, token, None) for logprob, token in place] for place in scores.likeliest]
        found["input_top_logprobs"] = [None, *places]
    return found
