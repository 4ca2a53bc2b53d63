"""One generation in progress: the request, its tokens so far, and its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.engine.errors import EngineRefused

_MAX_NEW_TOKENS = 128  # of a request that names no limit


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters; the names and defaults are SGLang's."""

    max_new_tokens: int | None = None  # 128, or what the context leaves of them
    temperature: float = 1.0  # 0 takes the likeliest token
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    min_new_tokens: int = 0  # until then the stop tokens have probability zero, also in the log-probs
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None
    stream_interval: int = 1


class PromptScores(msgspec.Struct):
    """Log-probs of a prompt from a position on, which has none itself; and of the likeliest tokens at each place."""

    start: int
    top: int = 0  # of these at each place
    logprobs: list[float] = []  # of the tokens after `start`
    likeliest: list[list[tuple[float, int]]] = []  # log-prob and id, in falling order
    open: bool = True  # not computed yet


class Finish(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reason why a generation ended, as on the wire."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


class Span(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by the weights called `version`."""

    version: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Request:
    """A generation. The scheduler owns it from `submit` to the call of `listener` that finds `finish` set."""

    rid: str
    prompt: list[int]
    sampling: Sampling
    _: KW_ONLY
    extra_key: str | None = None
    priority: int = 0  # a larger one takes the row of a smaller one
    streaming: bool = False
    listener: Callable[[Request], None] | None = None
    scores: PromptScores | None = None  # where those of the prompt are asked for
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: int = 0  # likeliest tokens in each place whose log-probs are returned
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)  # log-prob and id, in falling order
    spans: list[Span] = field(default_factory=list)  # closed ones; the open one reaches from the last end to the end
    routed: npt.NDArray[np.int32] | None = None  # [T, layers, K] at the end, [0, 0, 0] before, if asked for
    finish: Finish | None = None
    cached_tokens: int = 0
    retractions: int = 0
    late: bool = False  # it came while the engine was paused
    epoch: int = -1  # which weights computed its keys and values
    row: int = -1
    known: int = 0  # tokens whose keys and values the row has, as long as the prompt is not computed
    seed: int = 0
    limit: int = 0
    check_at: int = 0
    stops: frozenset[int] = frozenset()
    submitted_s: float = field(default_factory=time.perf_counter)
    admitted_s: float | None = None

    def accept(self, *, room: int, eos: Iterable[int], seed: int) -> None:
        """Settle what depends on the engine: at most `room` tokens, its end tokens, its random number."""
        sampling = self.sampling
        self.seed = seed
        self.limit = min(_MAX_NEW_TOKENS, room) if sampling.max_new_tokens is None else sampling.max_new_tokens
        self.stops = frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos)
        self.plan_check()

    @property
    def open_tokens(self) -> int:
        """Tokens that must be computed before the newest one can be fed."""
        return len(self.prompt) + len(self.tokens) - 1 - self.known

    def plan_check(self) -> None:
        """Set the number of tokens at which the scheduler must look at this request again, stop tokens aside."""
        count = len(self.tokens)
        self.check_at = self.limit
        if self.sampling.stop:
            self.check_at = count + 1
        elif self.streaming and (interval := self.sampling.stream_interval) < self.limit:
            self.check_at = min(self.limit, count + interval - (count - 1) % interval)

    def close_span(self, version: str) -> None:
        """The tokens since the last span were sampled by `version`."""
        start = self.spans[-1].end if self.spans else 0
        if len(self.tokens) > start:
            if self.spans and self.spans[-1].version == version:
                start = self.spans.pop().start
            self.spans.append(Span(version, start, len(self.tokens)))

    def wants_emission(self) -> bool:
        """Return whether a streaming request has its first token, or an interval more, as SGLang counts.

        With an interval that the request cannot reach its stream has the end alone; SGLang sends the first token, too.
        """
        interval = self.sampling.stream_interval
        return self.streaming and interval < self.limit and (len(self.tokens) - 1) % interval == 0

    def emit(self) -> None:
        """Notify the listener."""
        if self.listener is not None:
            self.listener(self)


def check_request(request: Request, vocab: int, context: int, eos: Collection[int]) -> None:
    """Refuse a request that no model of this vocabulary and context could run.

    Raises:
        EngineRefused: the prompt is empty or does not fit, or a token is not in the vocabulary.
    """
    prompt, sampling = request.prompt, request.sampling
    if not prompt:
        raise EngineRefused(f"request {request.rid}: input_ids is empty; give at least one token")
    check_length(len(prompt), sampling.max_new_tokens, context)
    if min(prompt) < 0 or max(prompt) >= vocab:
        wrong = next(token for token in prompt if not 0 <= token < vocab)
        raise EngineRefused(f"request {request.rid}: token id {wrong} is outside the vocabulary of {vocab}")
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab:
            raise EngineRefused(f"request {request.rid}: stop id {token} is outside the vocabulary of {vocab}")
    if sampling.min_new_tokens and len({*sampling.stop_token_ids, *eos}) >= vocab:
        raise EngineRefused(f"request {request.rid}: min_new_tokens, and every token of {vocab} is a stop id")


def check_length(prompt: int, new: int | None, context: int) -> None:
    """Refuse a request that exceeds the context, with SGLang's message.

    Args:
        prompt: tokens that are given.
        new: tokens that may be sampled, where the request limits them.
        context: tokens that there is room for.

    Raises:
        EngineRefused: they do not fit.
    """
    if prompt >= context:
        raise EngineRefused(
            f"The input ({prompt} tokens) is longer than the model's context length ({context} tokens)."
        )
    if new is not None and prompt + new > context:
        raise EngineRefused(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {prompt + new} tokens: {prompt} tokens from the input messages and {new} tokens for the "
            "completion. Please reduce the number of tokens in the input messages or the completion to fit within the "
            "limit."
        )
