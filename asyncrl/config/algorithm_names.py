"""Values of the settings that name an algorithm: the entries of its dictionary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.aggregation import AGGREGATIONS
from asyncrl.algorithms.filters import FILTERS
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.named import names
from asyncrl.algorithms.schedules import SCHEDULES

if TYPE_CHECKING:
    AdvantageName: TypeAlias = str
    AggregationName: TypeAlias = str
    FilterName: TypeAlias = str
    LossName: TypeAlias = str
    ScheduleName: TypeAlias = str
else:
    AdvantageName = Literal[names(ADVANTAGES)]
    AggregationName = Literal[names(AGGREGATIONS)]
    FilterName = Literal[names(FILTERS)]
    LossName = Literal[names(LOSSES)]
    ScheduleName = Literal[names(SCHEDULES)]
