"""Settings from a program, written as TOML: the form that the command line takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.reference import toml_text
from asyncrl.errors import WrongUsage

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def as_words(overrides: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Return overrides as `learner.steps=50`."""
    if isinstance(overrides, Mapping):
        return [f"{key}={inline(value)}" for key, value in overrides.items()]
    return list(overrides)


def toml_document(settings: Mapping[str, Any]) -> str:
    """Return nested settings as a TOML document."""
    return "".join(f"{_key(key)} = {inline(value)}\n" for key, value in settings.items())


def inline(value: Any) -> str:
    """Return a value as TOML on one line.

    Raises:
        WrongUsage: TOML has no such value.
    """
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {inline(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    if value is None:
        raise WrongUsage("found the value None in settings, expected a boolean, number, text, list or dictionary")
    return toml_text(value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else toml_text(key)
