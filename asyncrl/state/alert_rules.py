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
        more = self._condition.figure == "rate"  # a rate is the difference of two values
        self._values: deque[float] = deque(maxlen=self._condition.window + more)
        self._held = 0  # steps in a row
        self._raised = False

    def step(self, row: dict[str, Any]) -> AlertRaised | AlertEnded | None:
        """Take in the row of a step; returns what changes.

        Args:
            row: of `metrics.jsonl`, of a step of RL.
        """
        point = point_of(row)
        value = point.figures.get(self._figure)
        compared = self._compared(value)
        self._held = self._held + 1 if self._holds(row, value, compared) else 0
        holds = self._held >= self._condition.steps
        if holds == self._raised:
            return None
        self._raised, alert = holds, self.settings.name
        if holds:
            return AlertRaised(alert, self.settings.when, point.step, compared, self.settings.do)
        return AlertEnded(alert, point.step, compared)

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
        return (self._values[-1] - self._values[0]) / self._condition.window

    def _holds(self, row: dict[str, Any], value: float | None, compared: float | None) -> bool:
        lacks = self._condition.lacks
        if lacks:
            there = any(step_figure(field) == self._figure for field in row)
            return value is None and there == (lacks == "not finite")
        return compared is not None and bool(_SIGNS[self._condition.sign](compared, self._condition.bound))
