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
TaskName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^(?!(task|warmup)\Z)[a-z][a-z0-9_-]{0,31}\Z",  # topics.prompts gives these two a meaning
        description="a letter, then up to 31 of a to z, 0 to 9, _ and -, and not task or warmup",
    ),
]
StageName: TypeAlias = Annotated[
    str,
    Meta(pattern=r"^[a-z][a-z0-9_-]{0,31}\Z", description="a letter, then up to 31 of a to z, 0 to 9, _ and -"),
]
SCRIPTED = "scripted"  # kind of trainer and engine, for benchmarks and tests
BENCHMARKS = {"benchmarks": True}  # marks settings that the reference leaves out


class Settings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of every table of a config."""


def changed_keys(table: msgspec.Struct) -> list[str]:
    """The settings of a table that do not have their defaults."""
    plain = type(table)()
    return [key for key in table.__struct_fields__ if getattr(table, key) != getattr(plain, key)]
