"""Settings of alerts: a condition on the metrics of steps, and what follows."""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from asyncrl.config.setting_types import Settings

_METRIC = r"[\w.@/-]+"
_CONDITION = re.compile(
    rf"(?:(?P<figure>median|rate)\((?P<inner>{_METRIC}), *(?P<window>[1-9]\d{{0,3}})\)|(?P<metric>{_METRIC}))"
    r"(?: *(?P<sign><=|>=|<|>) *(?P<bound>[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)| +(?P<lacks>missing|not finite))"
    r"(?: +for +(?P<steps>[1-9]\d{0,3}) +steps?)?"
)
_EXPECTED = (
    "expected METRIC < NUMBER (or <=, >, >=), METRIC missing or METRIC not finite, then `for N steps` or nothing; "
    "median(METRIC, N) and rate(METRIC, N) may replace a compared METRIC"
)


class Condition(NamedTuple):
    """When an alert is raised."""

    metric: str
    figure: str = "value"  # or "median", or "rate": change per step
    window: int = 1  # steps of the median, or between the two values of the rate
    sign: str = ""  # of a comparison
    bound: float = 0.0
    lacks: str = ""  # "missing", "not finite"
    steps: int = 1  # in a row in which it holds


def parse_condition(text: str) -> Condition:
    """Parse a condition such as `reward/mean < 0.1 for 20 steps`.

    Raises:
        ValueError: it has another form.
    """
    found = _CONDITION.fullmatch(text.strip())
    if found is None or (found["figure"] and found["lacks"]):
        raise ValueError(f"{text!r} is no condition: {_EXPECTED}")
    return Condition(
        metric=found["inner"] or found["metric"],
        figure=found["figure"] or "value",
        window=int(found["window"] or 1),
        sign=found["sign"] or "",
        bound=float(found["bound"] or 0.0),
        lacks=found["lacks"] or "",
        steps=int(found["steps"] or 1),
    )


class AlertSettings(Settings):
    """A condition on the metrics of RL steps. The run publishes `alert.raised` and `alert.ended` once each time."""

    # Required: condition on a metric, such as `reward/mean < 0.1 for 20 steps`, `median(entropy, 10) < 0.05`,
    # `rate(response_length/mean, 20) > 8`, `loss not finite` or `lag/mean missing for 5 steps`.
    when: str
    name: Annotated[str, Meta(max_length=64)] = ""  # Name in messages; empty: the condition.
    # What follows, apart from the messages. `notify`: `webhook` and `command`; `stop`: the same, and the run stops.
    do: Literal["notify", "stop"] = "notify"
    webhook: str = ""  # URL to which the message is posted as JSON.
    command: list[str] = msgspec.field(default_factory=list)  # Program and arguments that get the message as JSON.

    def __post_init__(self) -> None:
        parse_condition(self.when)
        self.name = self.name or self.when[:64]
