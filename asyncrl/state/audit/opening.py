"""The settings that a run was opened with: its batches and ends must keep to them."""

from __future__ import annotations

from typing import Any

from asyncrl.bus.log import Record
from asyncrl.state.audit.violations import Violations
from topics.actors import ReissueRequested, RunOpened
from topics.ids import Stage

# Settings that a run keeps for as long as it goes on, as far as its ledger follows from them.
_FIXED = (
    "seed",
    "start",
    "warmup",
    "task.source",
    "task.options",
    "rollout.group_size",
    "buffer.batch_groups",
    "buffer.max_lag",
    "buffer.stale",
    "buffer.min_fresh",
    "buffer.filters",
    "buffer.group_deadline_s",
    "learner.publish_every",
)


class Opening:
    """The newest `run.opened`, whose settings are those of the first; None or a default where there is none."""

    def __init__(self, violations: Violations) -> None:
        self.settings: dict[str, Any] | None = None  # of the first
        self.steps: int | None = None  # RL steps of the run, as it was opened last
        self.first_step: int | None = None
        self.origins: list[str] = []  # prompts whose rows were requested again, in the order of the requests
        self.opened_ns = 0  # server's clock when it was opened last
        self._sequence = 0
        self._violations = violations

    def on_opened(self, message: RunOpened, record: Record) -> None:
        """Fold one in; one that changes what the ledger rests on is named, and changes nothing."""
        if self.settings is None:
            self.settings, self._sequence = message.settings, record.sequence
            self.first_step = self.start_step + 1 - message.warmup_steps
        changed = [name for name in _FIXED if _setting(self.settings, name) != _setting(message.settings, name)]
        for name in changed:
            found = f"{name} is {_setting(message.settings, name)!r} in message {record.sequence} of ACTORS"
            expected = f"{_setting(self.settings, name)!r}, as in message {self._sequence}"
            self._violations.add("bound changed", name, found, expected)
        if not changed:
            self.steps, self.opened_ns = message.steps, record.time_ns

    def on_reissue(self, message: ReissueRequested, _: Record) -> None:
        """An operator asks for another group on the row of a prompt.

        Raises:
            LookupError: there was no such request before.
        """
        name = message.prompt_id
        self.origins.append(self.origins[int(name[1:])] if name.startswith("r") else name)

    @property
    def max_lag(self) -> int | None:
        """Versions that a token may be behind."""
        return self._number("buffer.max_lag")

    @property
    def deadline_s(self) -> float | None:
        """Seconds after its issue when a group has an end, unless it is complete."""
        return _real(_setting(self.settings, "buffer.group_deadline_s"))

    @property
    def least_fresh(self) -> float | None:
        """Share of a trajectory's tokens that must be within the bound on lag, or it is dropped."""
        if (stale := _setting(self.settings, "buffer.stale")) is None:
            return None
        return _real(_setting(self.settings, "buffer.min_fresh")) if stale == "mask" else 1.0

    @property
    def filters(self) -> list[str]:
        """Names of the filters that drop groups."""
        return _setting(self.settings, "buffer.filters") or []

    def batch_groups(self, stage: Stage) -> int | None:
        """Groups of a batch."""
        if stage == "rl":
            return self._number("buffer.batch_groups")
        rows, each = self._number("warmup.batch_rows"), self._number("warmup.rows_per_trajectory")
        return rows // each if rows and each else None

    @property
    def lease_s(self) -> float | None:
        """Seconds that a silent worker keeps its work."""
        return _real(_setting(self.settings, "workers.lease_s"))

    @property
    def start_step(self) -> int:
        """Step of the weights that RL begins with."""
        return self._number("start.step") or 0

    @property
    def first_prompt(self) -> int:
        """Number of the first prompt of RL."""
        return self._number("start.prompt") or 0

    @property
    def keep_checkpoints(self) -> int:
        """Checkpoints that are kept."""
        return self._number("learner.keep_checkpoints") or 2

    def publishes(self, step: int) -> bool:
        """Return whether a step's weights are published."""
        every = self._number("learner.publish_every") or 1
        return step >= 0 and (step % every == 0 or step in (self.start_step, self.steps))

    def _number(self, name: str) -> int | None:
        value = _setting(self.settings, name)
        return value if isinstance(value, int) else None


def _setting(settings: dict[str, Any] | None, name: str) -> Any:
    """The value of a dotted name; None where it is not there."""
    value: Any = settings
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _real(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
