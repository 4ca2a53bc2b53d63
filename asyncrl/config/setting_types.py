"""Types of settings, and the base of their tables."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Rate: TypeAlias = Annotated[float, Meta(gt=0)]
NonNegative: TypeAlias = Annotated[float, Meta(ge=0)]
SCRIPTED = "scripted"  # kind of trainer and engine, for benchmarks and tests
BENCHMARKS = {"benchmarks": True}  # marks settings that the reference leaves out


class Settings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of every table of a config."""
