"""The open alerts of a run."""

from __future__ import annotations

from asyncrl.bus.log import Record
from asyncrl.state.roster import Roster
from topics.alerts import AlertEnded, AlertRaised


class OpenAlerts(Roster):
    """The part of a run's state that is about alerts."""

    def __init__(self) -> None:
        super().__init__()
        self.alerts: dict[str, AlertRaised] = {}  # by name

    def _on_alert_raised(self, message: AlertRaised, _record: Record) -> None:
        self.alerts[message.alert] = message

    def _on_alert_ended(self, message: AlertEnded, _record: Record) -> None:
        self.alerts.pop(message.alert, None)
