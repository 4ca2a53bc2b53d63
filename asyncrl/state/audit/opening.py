"""The settings that a run was opened with: its batches and ends must keep to them."""

from __future__ import annotations

import math
from operator import attrgetter

import msgspec

from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.config.renamed import read_settings
from asyncrl.config.settings import Config
from asyncrl.config.staged import all_filters
from asyncrl.state.audit.violations import Violations
from topics.actors import ReissueRequested, RunOpened
from topics.ids import REISSUE, letter_of, number_of
from topics.secrets import PurgeRequested

# Settings that a run never changes because its ledger follows from them.
_FIXED = (
    "seed",
    "start",
    "warmup",
    "task.source",
    "task.options",
    "task.curriculum",
    "tasks",
    "stages",
    "rollout.group_size",
    "rollout.oversample",
    "buffer.max_lag",
    "buffer.stale",
    "buffer.min_fresh",
    "buffer.group_deadline_s",
    "eval.deadline_s",
    "eval.engines",
    "learner.publish_every",
)


class Opening(Fold):
    """The newest `run.opened`, whose settings are those of the first."""

    def __init__(self, violations: Violations) -> None:
        self.config: Config | None = None  # of the first; None without a readable one
        self.fault = ""  # why its settings cannot be read
        self.steps: int | None = None  # RL steps of the run, as it was opened last
        self.first_step: int | None = None
        self.origins: list[str] = []  # prompts whose rows were requested again, in the order of the requests
        self.purged: dict[str, int] = {}  # data keys that were erased, and the server's clock when that was asked for
        self._settings: list[tuple[int, Config]] = []  # time of an opening, and the settings from there on
        self.digests: dict[str, str] = {}  # newest digests of code and data files, by path
        self.changed_inputs: dict[str, int] = {}  # path of each that changed, and the newest step trained before that
        self.opened_ns = 0  # server's clock when it was opened last
        self._sequence = 0
        self._violations = violations

    def _on_purge(self, message: PurgeRequested, record: Record) -> None:
        for secret in message.secrets:
            self.purged.setdefault(secret, record.time_ns)

    def is_purged(self, secrets: str, before_ns: float = math.inf) -> bool:
        """Return whether one of some data keys, with commas between, was erased before a time of the server's clock."""
        return any(self.purged.get(secret, math.inf) < before_ns for secret in secrets.split(","))

    def _on_opened(self, message: RunOpened, record: Record) -> None:
        """Fold one in; one that changes what the ledger rests on is named, and changes nothing."""
        try:
            config = read_settings(message.settings)
        except msgspec.ValidationError as error:
            self.fault = str(error)
            return
        if self.config is None:
            self.config, self._sequence = read_settings(message.settings), record.sequence
            self.first_step = config.start.step + 1 - message.warmup_steps
        changed = [
            f"learner.filter_options.{name}"
            for name in {*all_filters(self.config)} & {*all_filters(config)}
            if hasattr(config.learner.filter_options, name)
        ]
        changed = [name for name in (*_FIXED, *changed) if attrgetter(name)(config) != attrgetter(name)(self.config)]
        if self._settings and config.buffer.batch_groups < self._settings[-1][1].buffer.batch_groups:
            changed.append("buffer.batch_groups")  # it may be raised
        for name in changed:
            found = f"{name} is {attrgetter(name)(config)!r} in message {record.sequence} of ACTORS"
            expected = f"{attrgetter(name)(self.config)!r}, as in message {self._sequence}"
            self._violations.add("bound changed", name, found, expected)
        if not changed:
            self.steps, self.opened_ns = message.steps, record.time_ns
            other = [path for path, digest in message.inputs.items() if self.digests.get(path, digest) != digest]
            self.changed_inputs |= dict.fromkeys(other, message.trained)
            self.digests |= message.inputs
            self._settings.append((record.time_ns, config))
            learner = self.config.learner
            for name in config.learner.filters:  # a resumed run may have others, with their options
                if name not in all_filters(self.config) and hasattr(learner.filter_options, name):
                    setattr(learner.filter_options, name, getattr(config.learner.filter_options, name))
            learner.filters = sorted({*learner.filters, *config.learner.filters})

    def _on_reissue(self, message: ReissueRequested, _: Record) -> None:
        """An operator asks for another group on the row of a prompt.

        Raises:
            LookupError: there was no such request before.
        """
        name = message.prompt_id
        self.origins.append(self.origins[number_of(name)] if letter_of(name) == REISSUE else name)

    def settings_at(self, time_ns: int) -> Config:
        """The settings that held at a time of the server's clock."""
        known = [config for at_ns, config in self._settings if at_ns <= time_ns]
        return known[-1] if known else self.config or Config()

    @property
    def keep_checkpoints(self) -> int:
        """Checkpoints that are kept."""
        return (self.config or Config()).learner.keep_checkpoints

    @property
    def keeps_tokens(self) -> bool:
        """Return whether tokens stay until the end of the run, for any checkpoints."""
        return (self.config or Config()).nats.keep == "run"

    def publishes(self, step: int) -> bool:
        """Return whether a step's weights are published."""
        config = self.config or Config()
        return step >= 0 and (step % config.learner.publish_every == 0 or step in (config.start.step, self.steps))
