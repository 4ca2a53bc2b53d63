"""Types of settings, names of algorithms among them, and the base of their tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.aggregation import AGGREGATIONS
from asyncrl.algorithms.filters import FILTERS
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.named import names
from asyncrl.algorithms.schedules import SCHEDULES

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
    str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,31}\Z", description="a letter, then up to 31 of a to z, 0 to 9, _ and -")
]
BENCHMARKS = {"benchmarks": True}  # marks settings that the reference leaves out


class Settings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of every table of a config."""


def changed_keys(table: msgspec.Struct) -> list[str]:
    """The settings of a table that do not have their defaults."""
    plain = type(table)()
    return [key for key in table.__struct_fields__ if getattr(table, key) != getattr(plain, key)]


def given(table: msgspec.Struct, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The settings that a table whose settings may be left out gives, of some names or of all."""
    names = table.__struct_fields__ if names is None else names
    return {name: value for name in names if (value := getattr(table, name)) is not None}


OWN = "path/to/file.py:name"
"""A name of the user's own, as errors show it."""


def _own_or(table: Mapping[str, object]) -> Any:
    """Text that is an entry of a dictionary, or names a user's own."""
    known = names(table)
    pattern = rf"^(?:{'|'.join(known)}|.+:[A-Za-z_][A-Za-z0-9_]{{0,99}})\Z"
    return Annotated[str, Meta(pattern=pattern, extra={"names": (*known, OWN)})]


def kind_name(documented: tuple[str, ...], further: tuple[str, ...]) -> Any:
    """The name of a kind; the reference leaves out the `further` ones, which are for benchmarks and tests."""
    return Annotated[Literal[documented + further], Meta(extra={"names": documented})]


ColumnName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,31}\Z")]
OwnName: TypeAlias = Annotated[str, Meta(pattern=r"^.+:[A-Za-z_][A-Za-z0-9_]{0,99}\Z", extra={"names": (OWN,)})]

if TYPE_CHECKING:
    AdvantageName: TypeAlias = str
    AggregationName: TypeAlias = str
    FilterName: TypeAlias = str
    LossName: TypeAlias = str
    ScheduleName: TypeAlias = str
else:
    AdvantageName = _own_or(ADVANTAGES)
    AggregationName = Literal[names(AGGREGATIONS)]
    FilterName = _own_or(FILTERS)
    LossName = _own_or(LOSSES)
    ScheduleName = Literal[names(SCHEDULES)]
