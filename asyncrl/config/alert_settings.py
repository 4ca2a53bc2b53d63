"""Settings of alerts: a condition on the metrics of steps, and what follows."""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple, TypeAlias, get_args

import msgspec
from msgspec import Meta

from asyncrl.config.setting_types import Settings

SHIPPED = {
    "entropy-collapse": "median(entropy, 20) < 0.01",
    "ess-collapse": "median(ess, 5) < 0.3",
    "length-collapse": "ratio(response_length/mean, 50) < 0.3 for 5 steps",
    "no-spread": "flat_groups_share > 0.95 for 20 steps",
    "waste": "waste/share > 0.5 for 20 steps",
}
STALL = "stall"  # the shipped rule without a metric: a cause keeps the run from advancing
Shipped: TypeAlias = Literal["entropy-collapse", "ess-collapse", "length-collapse", "no-spread", "waste", "stall"]
ALL_SHIPPED: list[Shipped] = [*get_args(Shipped)]

_METRIC = r"[\w.@/-]+"
_CONDITION = re.compile(
    rf"(?:(?P<figure>median|rate|ratio)\((?P<inner>{_METRIC}), *(?P<window>[1-9]\d{{0,3}})\)|(?P<metric>{_METRIC}))"
    r"(?: *(?P<sign><=|>=|<|>) *(?P<bound>[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)| +(?P<lacks>missing|not finite))"
    r"(?: +for +(?P<steps>[1-9]\d{0,3}) +steps?)?"
)
_EXPECTED = (
    "expected METRIC < NUMBER (or <=, >, >=), METRIC missing or METRIC not finite, then `for N steps` or nothing; "
    "median(METRIC, N), rate(METRIC, N) and ratio(METRIC, N) may replace a compared METRIC"
)


class Condition(NamedTuple):
    """When an alert is raised."""

    metric: str
    figure: str = "value"  # or "median"; "rate": change per step; "ratio": to the median of the steps before
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
    # `rate(response_length/mean, 20) > 8`, `ratio(grad_norm, 20) > 5` (to the median of the 20 steps before),
    # `loss not finite` or `lag/mean missing for 5 steps`.
    when: str
    name: Annotated[str, Meta(max_length=64)] = ""  # Name in messages; empty: the condition.
    # What follows, apart from the messages. `notify`: `webhook` and `command`. The others do the same, and: `pause`
    # trains no further step until `asyncrl unpause`; `rollback` continues from the newest checkpoint from before the
    # condition held, and skips the batches since then; `stop` stops the run.
    do: Literal["notify", "pause", "rollback", "stop"] = "notify"
    # Rollbacks of this alert in the run; the next time, or without a checkpoint to go back to, the run stops.
    max_rollbacks: Annotated[int, Meta(ge=1)] = 2
    webhook: str = ""  # URL to which the message is posted as JSON.
    command: list[str] = msgspec.field(default_factory=list)  # Program and arguments that get the message as JSON.

    def __post_init__(self) -> None:
        parse_condition(self.when)
        self.name = self.name or self.when[:64]
