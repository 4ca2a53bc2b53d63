"""Messages about alerts: conditions on metrics that a config names."""

from __future__ import annotations

from topics.topic import FLEET, Topic
from topics.wire import Message, Step


class AlertRaised(Message):
    """The condition of an alert holds, and did not hold in the step before."""

    alert: str
    when: str  # the condition
    step: Step  # in which it holds for long enough
    value: float | None  # that was compared; None if it is missing or not finite
    do: str  # what follows: notify, stop


class AlertEnded(Message):
    """The condition holds no longer."""

    alert: str
    step: Step
    value: float | None


ALERT_RAISED = Topic(AlertRaised, FLEET, ("supervisor",), ("monitor", "supervisor"))
ALERT_ENDED = Topic(AlertEnded, FLEET, ("supervisor",), ("monitor", "supervisor"))
