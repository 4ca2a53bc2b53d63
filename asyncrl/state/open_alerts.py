"""The open alerts of a run, and whether one of them paused it."""

from __future__ import annotations

from typing import Final, Literal

from asyncrl.bus.log import Record
from asyncrl.state.roster import Roster
from topics.alerts import AlertEnded, AlertRaised, UnpauseRequested

PAUSED: Final[Literal["run paused"]] = "run paused"  # cause


class OpenAlerts(Roster):
    """The part of a run's state that is about alerts."""

    def __init__(self) -> None:
        super().__init__()
        self.alerts: dict[str, AlertRaised] = {}  # by name
        self.paused_at = 0  # sequence of the newest alert that pauses
        self.unpaused = 0  # sequence of the newest alert that an operator answered
        self._paused_by: AlertRaised | None = None

    @property
    def paused_by(self) -> AlertRaised | None:
        """The alert that paused training, until an operator answers."""
        return self._paused_by if self.paused_at > self.unpaused else None

    def _on_alert_raised(self, message: AlertRaised, record: Record) -> None:
        self.alerts[message.alert] = message
        if message.do == "pause":
            self.paused_at, self._paused_by = record.sequence, message

    def _on_alert_ended(self, message: AlertEnded, _record: Record) -> None:
        self.alerts.pop(message.alert, None)

    def _on_unpause(self, message: UnpauseRequested, _record: Record) -> None:
        self.unpaused = max(self.unpaused, message.after)
