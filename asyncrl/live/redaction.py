"""The user's function that redacts what live traffic says before it is stored; it runs in a child process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.child_pool.frames import CallFailed, Service, Setup
from asyncrl.child_pool.pool import ChildPool
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.errors import AsyncRLError
from asyncrl.functions import load_plain_function
from topics.turns import TurnFinished, TurnStarted
from topics.wire import Int32Array

_MEMORY_MB = 4096
_REPLY_BYTES = 64 * 2**20
_CHILDREN = 2  # a long text in one of them holds up no others


class RedactionFailed(AsyncRLError):
    """The function gave no texts: nothing of them is stored."""


class Redactor:
    """Hands text to the function before it is stored, and takes over its changes."""

    def __init__(self, spec: str, pool: ChildPool, tokenizer: TaskTokenizer) -> None:
        self._spec = spec
        self._pool = pool
        self._tokenizer = tokenizer

    @classmethod
    async def open(cls, spec: str, *, base: Path, limit_s: float, tokenizer: TaskTokenizer) -> Redactor:
        """Start child processes that load the function.

        Raises:
            FunctionError: it cannot be found or loaded, or is async.
        """
        setup = redaction_setup(spec, base=base, limit_s=limit_s)
        return cls(spec, await ChildPool.open(setup, workers=_CHILDREN), tokenizer)

    async def texts(self, texts: Sequence[str]) -> list[str]:
        """Return texts as they may be stored.

        Raises:
            RedactionFailed: the function raised, took too long, or returned something else.
        """
        try:
            return list(await self._pool.call(list(texts)))
        except CallFailed as error:  # whose message may repeat client text
            raise RedactionFailed(f"{self._spec} failed: {error.reason}") from None

    async def turn(self, fact: TurnStarted | TurnFinished) -> TurnStarted | TurnFinished:
        """Return the begin or the end of a turn in its stored form; the same object if nothing is redacted.

        Raises:
            RedactionFailed: as `texts`, or the model has no tokens for what the function wrote.
        """
        tokens = await self.redacted(fact.tokens)
        if tokens is None:
            return fact
        replace = msgspec.structs.replace
        if isinstance(fact, TurnStarted):  # no digest: no other gateway may match it with a request
            return replace(fact, tokens=tokens, digest="", key="", skip="redacted")
        versions = np.full(len(tokens), fact.versions.max(initial=-1), np.int32)
        logprobs = np.zeros(len(tokens), np.float32)
        changed = replace(fact, tokens=tokens, logprobs=logprobs, versions=versions, marks=[*fact.marks, "redacted"])
        return replace(changed, history="", same="", trial=0, canary=False, routing=None)

    async def redacted(self, tokens: Int32Array) -> Int32Array | None:
        """Return tokens of the redacted text; None if it was not redacted. Raises as `turn`."""
        if not len(tokens):
            return None
        text = self._tokenizer.decode_all(tokens.tolist())
        (redacted,) = await self.texts([text])
        if redacted == text:
            return None
        try:
            return self._tokenizer.encode(redacted)
        except TokenizerError as error:
            raise RedactionFailed(f"the model has no tokens for what {self._spec} returned") from error

    async def close(self) -> None:
        """Kill the children."""
        await self._pool.close()


def redaction_setup(spec: str, *, base: Path, limit_s: float) -> Setup:
    """Return the setup by which a child loads the function."""
    arguments = {"spec": spec, "base": str(base)}
    return Setup(spec, f"{__name__}:serve_redaction", arguments, limit_s, _MEMORY_MB, _REPLY_BYTES, silent=True)


def serve_redaction(spec: str, base: str) -> Service:
    """Load the function.

    Raises:
        FunctionError: it cannot be found or loaded, or is async.
    """
    function = load_plain_function(spec, base=Path(base), argument="texts")
    return Service(functools.partial(_call, function), _texts)


def _call(function: Callable[..., Any], texts: list[str]) -> tuple[Any, int]:
    return function(texts), len(texts)


def _texts(answer: tuple[Any, int]) -> list[str]:
    """Read its result.

    Raises:
        CallFailed: with reason `value`.
    """
    value, count = answer
    if not isinstance(value, list) or len(value) != count or not all(isinstance(text, str) for text in value):
        raise CallFailed("value", f"it returned a {type(value).__name__}; expected a list of {count} texts")
    return value
