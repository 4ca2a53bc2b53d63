"""Values of the settings that name an algorithm: the entries of its dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.aggregation import AGGREGATIONS
from asyncrl.algorithms.filters import FILTERS
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.named import names
from asyncrl.algorithms.schedules import SCHEDULES

OWN = "path/to/file.py:name"
"""A name of the user's own, as errors show it."""


def _own_or(table: Mapping[str, object]) -> Any:
    """Text that is an entry of a dictionary, or names a user's own."""
    known = names(table)
    pattern = rf"^(?:{'|'.join(known)}|.+:[A-Za-z_][A-Za-z0-9_]{{0,99}})\Z"
    return Annotated[str, Meta(pattern=pattern, extra={"names": (*known, OWN)})]


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
