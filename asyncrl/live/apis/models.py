"""The models of a gateway, `/v1/models`, in the words of both vendors at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.live.apis.schema import LiveError

MODELS_PATH = "/v1/models"


def model_body(name: str) -> dict[str, Any]:
    """Return one model."""
    date = {"created": 0, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "type": "model", "owned_by": "asyncrl", "display_name": name, **date}


def models_body(names: Sequence[str]) -> dict[str, Any]:
    """Return the list of models."""
    ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": [model_body(name) for name in names], **ends}


def check_model(name: str, models: Sequence[str]) -> None:
    """Refuse a model that is not served.

    Args:
        models: those that are; none: any.

    Raises:
        LiveError: it is not among them.
    """
    if models and name not in models:
        words = f"model {name!r} is not served here; there are {', '.join(models)}"
        raise LiveError("absent", words, field="model")
