"""The newest profiles of a run."""

from __future__ import annotations

from asyncrl.bus.log import Record
from asyncrl.state.open_alerts import OpenAlerts
from topics.profiles import ProfileStored

_KEPT = 32


class StoredProfiles(OpenAlerts):
    """The part of a run's state that is about profiles."""

    def __init__(self) -> None:
        super().__init__()
        self.profiles: list[ProfileStored] = []  # the newest last

    def _on_profile_stored(self, message: ProfileStored, _record: Record) -> None:
        self.profiles = [*self.profiles, message][-_KEPT:]
