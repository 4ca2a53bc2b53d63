"""Options of the filters of groups."""

from __future__ import annotations

import msgspec

from asyncrl.algorithms.filters import FILTERS, Garbage, Length, PassRate, Repetition
from asyncrl.config.setting_types import Settings


class FilterOptions(Settings):
    """Options of the filters that `learner.filters` names."""

    pass_rate: PassRate = PassRate()
    length: Length = Length()
    repetition: Repetition = Repetition()
    garbage: Garbage = Garbage()

    def of(self, filters: list[str]) -> dict[str, dict[str, object]]:
        """Options of some filters by name; those without options are left out."""
        return {name: msgspec.to_builtins(getattr(self, name)) for name in filters if FILTERS[name].__struct_fields__}
