"""Errors between a sampler and its engine."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from asyncrl.errors import UNREADABLE, AsyncRLError

_WORDS = 500  # characters of what a server says

LOGITS_NOT_FINITE = "logits are not finite"
"""Words with which the embedded engine ends when its weights give NaN; the doctor looks for them."""


class EngineError(AsyncRLError):
    """The engine cannot carry out a call: the found value, the expected value, the remedy."""


class EngineRefused(EngineError):
    """The engine understood the request and will never accept it (HTTP 400). Do not retry."""


class EngineOverloaded(EngineError):
    """The engine has no room for the request now (HTTP 429 or 503). Retry after a pause, here or elsewhere."""


class VersionAbsent(EngineError):
    """No engine has the version of the weights that was asked for. Ask again later, or for another version."""


class RequestFailed(EngineError):
    """The engine answered this request with a fault or an invalid answer. Retry it alone, a few times."""


class EngineUnavailable(EngineError):
    """The engine could not be reached, or its connection broke. Retry, here or elsewhere."""

    def __init__(self, address: str, detail: str) -> None:
        super().__init__(f"engine {address}: {detail}")
        self.address = address
        self.detail = detail


def fault_of(status: int, words: str) -> EngineError:
    """The error of an HTTP status, or of the code of an event inside a stream.

    Of its words the beginning counts: they go into logs, vital signs and errors.
    """
    words = words[:_WORDS]
    if status == 400:
        return EngineRefused(words)
    kind = EngineOverloaded if status in (429, 503) else RequestFailed
    return kind(f"HTTP {status}: {words}")


class _Refusal(msgspec.Struct):
    """Read the error of an SGLang answer, which has it in one of three places."""

    error: Any = None
    message: str | None = None


def message_of(raw: bytes) -> str:
    """Return the text of an error answer in one line: a foreign server may answer with a page."""
    words: Any = raw[:4096].decode(errors="replace")
    with contextlib.suppress(*UNREADABLE):
        refusal = msgspec.json.decode(raw, type=_Refusal)
        error = refusal.error
        words = (error.get("message", error) if isinstance(error, dict) else refusal.message or error) or words
    return " ".join(str(words).split())[:_WORDS]
