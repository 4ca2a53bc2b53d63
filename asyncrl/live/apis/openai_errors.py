"""Refusals as OpenAI's two APIs have them."""

from __future__ import annotations

from typing import Any

from asyncrl.live.apis.words import Fault, LiveError

_STATUS: dict[Fault, tuple[int, str, str | None]] = {  # with type and code
    "invalid": (400, "invalid_request_error", None),
    "key": (401, "invalid_request_error", "invalid_api_key"),
    "forbidden": (403, "invalid_request_error", None),
    "absent": (404, "invalid_request_error", "model_not_found"),
    "large": (413, "invalid_request_error", None),
    "limited": (429, "rate_limit_error", "rate_limit_exceeded"),
    "internal": (500, "server_error", None),
    "overloaded": (503, "server_error", None),
}


def openai_error(error: LiveError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of a refusal."""
    status, kind, code = _STATUS[error.fault]
    if code == "model_not_found" and error.field != "model":
        code = "not_found"
    return status, {"error": {"message": str(error), "type": kind, "param": error.field, "code": error.code or code}}
