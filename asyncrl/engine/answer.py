"""Parse an engine's answers leniently: SGLang 0.5.17 and the embedded engine differ, and aborts lack fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, cast

import msgspec
import numpy as np

from asyncrl.engine.errors import EngineError, EngineRefused, RequestFailed, fault_of
from topics.wire import Float32Array, Int32Array

FinishType = Literal["stop", "length", "abort"]
_NEVER_STARTED = 499  # status of a request that was aborted before it began


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by the weights called `version`."""

    version: str
    start: int
    end: int


class Chunk(msgspec.Struct, frozen=True):
    """New tokens of a running generation."""

    token_ids: Int32Array  # [T]
    logprobs: Float32Array  # [T]
    weight_version: str  # of the last token


class Generation(msgspec.Struct, frozen=True):
    """A generation that ended."""

    token_ids: Int32Array  # [T] sampled tokens, a stop token included
    logprobs: Float32Array  # [T] natural log, at the request's temperature, before top-p, top-k and min-p
    weight_versions: list[VersionSpan]  # exact where the engine reports it, else one span per streamed chunk
    finish_reason: FinishType


OnTokens: TypeAlias = Callable[[Chunk], bool | None]
"""Takes new tokens; one that returns False wants no more, and the generation ends there as an aborted one."""


class _Finish(msgspec.Struct, frozen=True):
    type: str = "abort"
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: _Finish | None = None
    completion_tokens: int | None = None
    weight_version: str = ""
    weight_versions: list[VersionSpan] | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None


class _Fault(msgspec.Struct, frozen=True):
    message: str = ""
    code: int | str | None = None

    def error(self) -> EngineError:
        """Classify an error; SGLang gives no code where it refuses an input."""
        return fault_of(self.code, self.message) if isinstance(self.code, int) else EngineRefused(self.message)


class Answer(msgspec.Struct, frozen=True):
    """An answer of /generate, or one event of its stream."""

    output_ids: list[int] = []
    meta_info: _Meta = _Meta()
    index: int = 0
    error: _Fault | None = None


decode_answer: Callable[[bytes], Answer] = msgspec.json.Decoder(Answer).decode


class Assembly:
    """Puts the events of one generation together, whether they are cumulative or carry only what is new."""

    def __init__(self, on_tokens: OnTokens | None = None) -> None:
        self.cut = False  # the caller wanted no more while the engine goes on
        self._on_tokens = on_tokens
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._finish: _Finish | None = None

    @property
    def finished(self) -> bool:
        """Return whether the last event came."""
        return self._finish is not None

    @property
    def begun(self) -> bool:
        """Return whether a token came."""
        return bool(self._tokens)

    def add(self, answer: Answer) -> None:
        """Take one event in.

        Raises:
            EngineError: the engine ended the generation because of a fault, or a token came without its log-prob.
        """
        meta, wanted = answer.meta_info, True
        have, ids = len(self._tokens), answer.output_ids
        total = len(ids) if meta.completion_tokens is None else meta.completion_tokens
        fresh = total - have
        logprobs = meta.output_token_logprobs or []
        # A stream aborted in the queue carries only its last token: the ones before it cannot be known; it is left out.
        if 0 < fresh <= len(ids) and fresh <= len(logprobs):
            new_ids, new_logprobs = ids[-fresh:], _known([triple[0] for triple in logprobs[-fresh:]], have)
            self._tokens += new_ids
            self._logprobs += new_logprobs
            self._extend_spans(meta)
            if self._on_tokens is not None:
                chunk = Chunk(np.array(new_ids, np.int32), np.array(new_logprobs, np.float32), meta.weight_version)
                wanted = self._on_tokens(chunk) is not False
        finish = meta.finish_reason
        if finish is not None and finish.type == "abort" and finish.status_code not in (None, _NEVER_STARTED):
            raise fault_of(finish.status_code, finish.message or "aborted")
        self.cut = not wanted and finish is None
        self._finish = _Finish("abort") if self.cut else finish

    def abort(self) -> None:
        """The engine never started it."""
        self._finish = _Finish("abort")

    def result(self) -> Generation:
        """The generation, once `finished`."""
        reason = self._finish.type if self._finish is not None else "abort"
        return Generation(
            token_ids=np.array(self._tokens, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            weight_versions=self._spans,
            finish_reason=cast(FinishType, reason) if reason in ("stop", "length") else "abort",
        )

    def _extend_spans(self, meta: _Meta) -> None:
        count = len(self._tokens)
        if meta.weight_versions:
            self._spans = meta.weight_versions
        elif self._spans and self._spans[-1].version == meta.weight_version:
            self._spans[-1] = VersionSpan(meta.weight_version, self._spans[-1].start, count)
        else:
            start = self._spans[-1].end if self._spans else 0
            self._spans.append(VersionSpan(meta.weight_version, start, count))


def _known(logprobs: list[float | None], have: int) -> list[float]:
    """Log-probs of the tokens behind the first `have`: JSON spells a number that is not finite as null."""
    known = [logprob for logprob in logprobs if logprob is not None]
    if len(known) < len(logprobs):
        raise RequestFailed(f"token {have + logprobs.index(None)} came with no log-prob (null: not a finite number)")
    return known
