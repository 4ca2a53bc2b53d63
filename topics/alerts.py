"""Messages about alerts: conditions on metrics that a config names."""

from __future__ import annotations

from topics.topic import ACTORS, FLEET, Topic
from topics.wire import Message, Sequence, Step


class AlertRaised(Message):
    """The condition of an alert holds, and did not hold in the step before."""

    alert: str
    when: str  # the condition
    step: Step  # in which it holds for long enough
    value: float | None  # that was compared; None if it is missing or not finite
    do: str  # what follows: notify, pause, rollback, stop
    checkpoint: Step | None = None  # with rollback: step of the newest checkpoint from before the condition held


class AlertEnded(Message):
    """The condition holds no longer."""

    alert: str
    step: Step
    value: float | None


class UnpauseRequested(Message):
    """Request to train again after an alert paused the run."""

    after: Sequence  # of the newest `alert.raised` that is answered


ALERT_RAISED = Topic(AlertRaised, FLEET, ("supervisor",), ("monitor", "supervisor", "learner"))
ALERT_ENDED = Topic(AlertEnded, FLEET, ("supervisor",), ("monitor", "supervisor"))
UNPAUSE_REQUESTED = Topic(UnpauseRequested, ACTORS, ("operator",), ("learner", "monitor"), repeats=True)
