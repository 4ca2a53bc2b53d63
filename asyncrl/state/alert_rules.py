"""Conditions of alerts, fed with the rows of steps: a pure function of these rows."""

from __future__ import annotations

import operator
from collections import deque
from statistics import median
from typing import Any

from asyncrl.config.alert_settings import AlertSettings, parse_condition
from asyncrl.sinks.figures import point_of, step_figure
from topics.alerts import AlertEnded, AlertRaised

_SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class AlertRule:
    """One alert over the RL steps of a run."""

    def __init__(self, settings: AlertSettings) -> None:
        self.settings = settings
        self._condition = parse_condition(settings.when)
        self._figure = step_figure(self._condition.metric)
        more = self._condition.figure in ("rate", "ratio")  # which compare a value with those before it
        self._values: deque[float] = deque(maxlen=self._condition.window + more)
        self._held = 0  # steps in a row
        self._raised = False
        self._rolled_back = -1  # lineage in which a rollback was asked for: its further steps do not count

    def step(self, row: dict[str, Any]) -> AlertRaised | AlertEnded | None:
        """Take in the row of a step; returns what changes.

        Args:
            row: of `metrics.jsonl`, of a step of RL.
        """
        lineage = row.get("lineage", 0)
        if lineage <= self._rolled_back:
            return None
        point, alert = point_of(row), self.settings.name
        value = point.figures.get(self._figure)
        begins = self._rolled_back >= 0
        if begins:
            self._values.clear()
            self._held, self._rolled_back = 0, -1
        compared = self._compared(value)
        self._held = self._held + 1 if self._holds(row, value, compared) else 0
        holds = self._held >= self._condition.steps and not begins
        if holds == self._raised:
            return None
        self._raised = holds
        if not holds:
            return AlertEnded(alert, point.step, compared)
        if self.settings.do == "rollback":
            self._rolled_back = lineage
        return AlertRaised(alert, self.settings.when, point.step, compared, self.settings.do)

    @property
    def looked_back(self) -> int:
        """Steps before the newest one that a raised alert depends on."""
        wide = self._condition.figure in ("median", "rate")
        return self._condition.steps - 1 + (self._condition.window - 1 if wide else 0)

    def _compared(self, value: float | None) -> float | None:
        """Return the value, median or rate; None while values are too few."""
        if value is None:
            return None
        self._values.append(value)
        if self._condition.figure == "value":
            return value
        if len(self._values) < (self._values.maxlen or 1):
            return None
        if self._condition.figure == "median":
            return median(self._values)
        if self._condition.figure == "ratio":
            usual = median([*self._values][:-1])
            return value / usual if usual else None
        return (self._values[-1] - self._values[0]) / self._condition.window

    def _holds(self, row: dict[str, Any], value: float | None, compared: float | None) -> bool:
        lacks = self._condition.lacks
        if lacks:
            there = any(step_figure(field) == self._figure for field in row)
            return value is None and there == (lacks == "not finite")
        return compared is not None and bool(_SIGNS[self._condition.sign](compared, self._condition.bound))
