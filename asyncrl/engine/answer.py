"""Parse an engine's answers leniently: SGLang 0.5.17 and the embedded engine differ, and aborts lack fields."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import msgspec
import numpy as np

from asyncrl.engine.errors import EngineError, RequestFailed, fault_of
from asyncrl.tracing import trace_headers, traceparent
from topics.values import checked_logprobs
from topics.wire import Float32Array, Int32Array

FinishType = Literal["stop", "length", "abort"]
_GREATEST_TOKEN = 2**31 - 1  # ids are int32
_NEVER_STARTED = 499  # status of a request that was aborted before it began


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by the weights called `version`."""

    version: str
    start: int
    end: int


Likeliest: TypeAlias = list[tuple[int, float]]  # tokens and their log-probs in one place, in falling order


class Chunk(msgspec.Struct, frozen=True):
    """New tokens of a running generation."""

    token_ids: Int32Array  # [T]
    logprobs: Float32Array  # [T]
    weight_version: str
    reported: bool = (
        False  # by the engine, for each of these tokens; else it is the label of the event that brought them
    )
    likeliest: list[Likeliest] = []  # at the position of each token, if requested


class Generation(msgspec.Struct, frozen=True):
    """A generation that ended."""

    token_ids: Int32Array  # [T] sampled tokens, a stop token included
    logprobs: Float32Array  # [T] natural log, at the request's temperature, before top-p, top-k and min-p
    weight_versions: list[VersionSpan]  # exact where the engine reports it, else one span per streamed chunk
    finish_reason: FinishType
    routed: Int32Array | None = None  # experts of fed tokens, layer by layer; None if not returned
    likeliest: list[Likeliest] = []  # at the position of each token, if requested
    passes: int = 0  # passes in which the model verified drafted tokens; 0 without drafts
    routed_from: int = 0  # first token of `routed`, as it was asked for
    cached: int = 0  # tokens of the prompt that the engine had in its prefix cache


OnTokens: TypeAlias = Callable[[Chunk], bool | None]
"""Takes new tokens; one that returns False wants no more, and the generation ends there as an aborted one."""


_Triple: TypeAlias = tuple[float | None, int, str | None]  # log-prob, token, its text


class Finish(msgspec.Struct, frozen=True):
    """The end of a generation."""

    type: str = "abort"
    message: str | None = None
    status_code: int | None = None


class Meta(msgspec.Struct, frozen=True):
    """Facts about an answer, or about its part in an event."""

    finish_reason: Finish | None = None
    completion_tokens: int | None = None
    weight_version: str = ""
    weight_versions: list[VersionSpan] = []  # of all output tokens, in order; SGLang 0.5.17 sends none
    output_token_logprobs: list[_Triple] | None = None
    output_top_logprobs: list[list[_Triple] | None] | None = None
    routed_experts: bytes | None = None  # Base64 of int32, in the last event
    spec_verify_ct: int = 0  # passes so far; sent by servers that draft tokens
    cached_tokens: int | None = None


class _Fault(msgspec.Struct, frozen=True):
    message: str = ""
    code: int | str | None = None

    def error(self) -> EngineError:
        """Classify an error; SGLang gives no code for a refused input."""
        return fault_of(self.code if isinstance(self.code, int) else 400, self.message)


class Answer(msgspec.Struct, frozen=True):
    """An answer of /generate, or one event of its stream."""

    output_ids: list[int] = []
    meta_info: Meta = Meta()
    index: int = 0
    error: _Fault | None = None


decode_answer: Callable[[bytes], Answer] = msgspec.json.Decoder(Answer).decode


_ROUTING_KEY = "X-SMG-Routing-Key"  # header of sglang-router


@dataclass(slots=True, eq=False)
class Member:
    """One generation in progress: its events are joined, cumulative or incremental."""

    input_ids: list[int]
    sampling: dict[str, Any]
    extra_key: str | None
    on_tokens: OnTokens | None
    group: str = ""
    routed: int | None = None
    priority: int = 0
    top: int = 0
    adapter: str = ""
    traceparent: str = field(default_factory=traceparent)  # of the trajectory, if it is traced
    rid: str = field(default_factory=partial(secrets.token_hex, 16))  # SGLang matches prefixes: random ones are safe
    future: asyncio.Future[Generation] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    left: bool = False  # by its caller, while the engine may continue
    seen_at: float = field(default_factory=time.monotonic)  # when its last part came, or when it was requested
    _tokens: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _likeliest: list[Likeliest] = field(default_factory=list)
    _spans: list[VersionSpan] = field(default_factory=list)
    _routed: Int32Array | None = None
    _passes: int = 0
    _cached: int = 0

    @property
    def streaming(self) -> bool:
        """Return whether its caller wants its tokens as they come."""
        return self.on_tokens is not None

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of a request for this generation alone."""
        return trace_headers(self.traceparent) | ({_ROUTING_KEY: self.group} if self.group else {})

    def touch(self) -> None:
        """Take note that the engine advances."""
        self.seen_at = time.monotonic()

    @property
    def begun(self) -> bool:
        """Return whether a token came."""
        return bool(self._tokens)

    def take(self, answer: Answer) -> None:
        """Take one event in; answers the caller if the generation ended, or is not wanted any more."""
        if self.future.done():
            return
        self.seen_at = time.monotonic()
        try:
            wanted = self._add(answer)
        except Exception as fault:  # the engine's, or one of the caller's own callback: each is for the caller alone
            self.left = True
            self.fail(fault)
            return
        finish = answer.meta_info.finish_reason
        self.left = not wanted and finish is None
        if self.left or finish is not None:
            self.end(finish.type if finish is not None else "abort")

    def end(self, reason: str) -> None:
        """Answer the caller with what came, unless it was answered or left."""
        if not self.future.done():
            tokens, logprobs = np.array(self._tokens, np.int32), np.array(self._logprobs, np.float32)
            finish = cast(FinishType, reason) if reason in ("stop", "length") else "abort"
            further = (self._routed, self._likeliest, self._passes, self.routed or 0, self._cached)
            self.future.set_result(Generation(tokens, logprobs, self._spans, finish, *further))

    def fail(self, fault: Exception) -> None:
        """Notify the caller, unless it was answered or left."""
        if not self.future.done():
            self.future.set_exception(fault)

    def _add(self, answer: Answer) -> bool:
        """Add the tokens of an event; False where the caller wants no more.

        Raises:
            EngineError: the engine ended the generation because of a fault, or a token came without its log-prob, or
                with that of another one.
        """
        meta, wanted = answer.meta_info, True
        self._passes = max(self._passes, meta.spec_verify_ct)
        self._cached = max(self._cached, meta.cached_tokens or 0)
        if meta.routed_experts is not None:
            if len(meta.routed_experts) % 4:
                raise RequestFailed(f"{len(meta.routed_experts)} bytes of experts came; expected int32 numbers")
            self._routed = np.frombuffer(meta.routed_experts, "<i4")
        finish = meta.finish_reason
        aborted = finish is not None and finish.type == "abort"
        have, ids = len(self._tokens), answer.output_ids
        total = len(ids) if meta.completion_tokens is None else meta.completion_tokens
        fresh = total - have
        logprobs = meta.output_token_logprobs or []
        # A stream aborted in the queue carries only its last token: the ones before it cannot be known; it is left out.
        if 0 < fresh <= len(ids) and fresh <= len(logprobs):
            new_ids = ids[-fresh:]
            new_logprobs = _known(logprobs[-fresh:], new_ids, have)
            if min(new_ids) < 0 or max(new_ids) > _GREATEST_TOKEN:
                raise RequestFailed(f"tokens {min(new_ids)} to {max(new_ids)} came; no vocabulary has all of these")
            self._tokens += new_ids
            self._logprobs += new_logprobs
            if self.top:
                self._likeliest += _likeliest(meta, fresh)
            if meta.weight_versions and (spans := _reported(meta, have, total)):
                for span in spans:
                    part = slice(span.start - have, span.end - have)
                    wanted = wanted and self._hand_on(span, new_ids[part], new_logprobs[part], reported=True)
            else:
                span = VersionSpan(meta.weight_version, have, total)
                wanted = self._hand_on(span, new_ids, new_logprobs, reported=False)
        elif fresh > 0 and not aborted:
            words = f"{fresh} new tokens came with {len(ids)} ids and {len(logprobs)} log-probs"
            raise RequestFailed(f"{words}; expected one of each for every token")
        elif not aborted and (fresh < 0 or (finish is not None and not total)):
            raise RequestFailed(f"{total} tokens came where {have} had come before; expected those, and at least one")
        if finish is not None and aborted and finish.status_code not in (None, _NEVER_STARTED):
            raise fault_of(finish.status_code, finish.message or "aborted")
        return wanted

    def _hand_on(self, span: VersionSpan, ids: list[int], logprobs: list[float], *, reported: bool) -> bool:
        """Note the version of new tokens, and hand them to the caller; False if it wants no more."""
        if self._spans and self._spans[-1].version == span.version:
            self._spans[-1] = VersionSpan(span.version, self._spans[-1].start, span.end)
        else:
            self._spans.append(span)
        if self.on_tokens is None:
            return True
        likeliest = self._likeliest[span.start : span.end] if self.top else []
        tokens, values = np.array(ids, np.int32), np.array(logprobs, np.float32)
        return self.on_tokens(Chunk(tokens, values, span.version, reported, likeliest)) is not False


def _reported(meta: Meta, start: int, end: int) -> list[VersionSpan]:
    """The versions of the tokens [start, end) as the engine reports them; none unless it reports all of them.

    A chunk may straddle an update: newer engines say which of its tokens came before.
    """
    known = [VersionSpan(span.version, max(span.start, start), min(span.end, end)) for span in meta.weight_versions]
    known = [span for span in known if span.start < span.end]
    ends = [start, *(span.end for span in known)]
    whole = ends[-1] == end and all(span.start == begin for span, begin in zip(known, ends[:-1], strict=True))
    return known if whole else []


def _likeliest(meta: Meta, fresh: int) -> list[Likeliest]:
    """The likeliest tokens in the places of the newest ones; none in a place of which the engine returned none."""
    places = (meta.output_top_logprobs or [])[-fresh:]
    known = [[(token, value) for value, token, _ in place or () if value is not None] for place in places]
    return [*[[]] * (fresh - len(known)), *known]


def _known(triples: list[_Triple], ids: list[int], have: int) -> list[float]:
    """Return the log-probs of the tokens after the first `have`: JSON writes a number that is not finite as null.

    Raises:
        RequestFailed: one is no log-prob (see `checked_logprobs`), or it is that of another token.
    """
    given, named = [triple[0] for triple in triples], [triple[1] for triple in triples]
    try:
        known = checked_logprobs(np.array([math.nan if one is None else one for one in given]), have)
    except ValueError as error:
        raise RequestFailed(str(error)) from error
    if named != ids:
        place = next(at for at, (name, one) in enumerate(zip(named, ids, strict=True)) if name != one)
        words = f"token {have + place} is {ids[place]}, its log-prob that of {named[place]}"
        raise RequestFailed(f"{words}; expected that of the sampled token")
    values: list[float] = known.tolist()
    return values


Decode = Callable[[list[int]], str]


def reach_of(stop: Sequence[str]) -> int:
    """Return how many tokens may hold the longest of these strings and one more: a token has at least a byte."""
    return max(len(text.encode()) for text in stop) + 1


def stop_string(tokens: Sequence[int], stop: Sequence[str], decode: Decode) -> str | None:
    """The stop string that the last of these tokens completes, if it does.

    Args:
        tokens: [T] all that was sampled so far.
        stop: at least one.
        decode: tokens to text, special tokens included.
    """
    tail = decode(list(tokens[-reach_of(stop) :]))
    return next((text for text in stop if text in tail), None)
