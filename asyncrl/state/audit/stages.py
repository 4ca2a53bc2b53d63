"""Check where the stages of a run began (as operators or settings asked, before the first prompt that obeys them),
and which batches follow them.
"""

from __future__ import annotations

import msgspec

from asyncrl.algorithms.losses import LOSSES
from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from asyncrl.config.staged import Ended, Schedule
from asyncrl.config.tasks import Begun, first_stages
from asyncrl.state.audit.groups import Groups
from asyncrl.state.audit.opening import Opening
from asyncrl.state.audit.violations import Violations
from asyncrl.training.objective import algorithms_of, objective_of
from topics.batches import BatchPacked
from topics.groups import GroupDropped
from topics.ids import LIVE, REISSUE, TASK, letter_of, number_of, prompt_name, prompt_of
from topics.prompts import PromptIssuedHeaders
from topics.stages import StageBeganHeaders, StageRequested


class Stages(Fold):
    """The stages of a run, in their order."""

    def __init__(self, opening: Opening, groups: Groups, violations: Violations) -> None:
        self._opening, self._groups, self._violations = opening, groups, violations
        self._requests: dict[int, str] = {}  # names by sequence
        self._answered = 0
        self._begun: list[Begun] = []
        self._schedule: Schedule | None = None
        self._ended, self._due = Ended(), ""  # of the batches so far, and the stage whose condition held
        self._again: dict[str, int] = {}  # prompts that were issued again: stages that had begun
        self._packed = 0  # stages that had begun for the newest prompt of a batch

    @property
    def begun(self) -> list[Begun]:
        """All stages that began, those before a fork first."""
        config = self._opening.config
        return self._begun if config is None else [*first_stages(config.start), *self._begun]

    def _on_requested(self, message: StageRequested, record: Record) -> None:
        self._requests[record.sequence] = message.name

    def _on_began(self, began: StageBeganHeaders, _record: Record) -> None:
        """Compare one with its request and the prompts before it.

        Raises:
            LookupError: a stage that the run does not have.
        """
        config = self._opening.config
        if config is not None and began.name not in config.stages:
            raise LookupError(f"{began.name!r} is no stage of the run")
        what = f"stage {began.name}"
        if began.after is not None:
            self._check_condition(began)
        elif began.request <= self._answered or self._requests.get(began.request) != began.name:
            found = f"message {began.request} of ACTORS, after message {self._answered}"
            self._violations.add("unasked stage", what, found, f"a later request for {began.name}")
        newest = self._groups.newest_issued.get(TASK)
        first = (config.start.prompt if config is not None else 0) if newest is None else newest + 1
        if began.prompt != first:
            found, expected = prompt_name(TASK, began.prompt), prompt_name(TASK, first)
            self._violations.add("unasked stage", what, f"from {found} on", f"{expected}, the first not issued yet")
        self._answered = max(self._answered, began.request)
        self._begun.append((began.prompt, began.name))
        self._due = self._schedule.due(self._ended, self.begun) if self._schedule else ""

    def _check_condition(self, began: StageBeganHeaders) -> None:
        """Compare a stage that began by itself with the batches before it."""
        if self._due != began.name:
            found = f"by itself after batch {began.after}"
            self._violations.add("unasked stage", f"stage {began.name}", found, self._due or "no stage, by its batches")

    def _on_issued(self, headers: PromptIssuedHeaders, _record: Record) -> None:
        prompt_id = prompt_of(headers.trajectory_id)
        if letter_of(prompt_id) in (REISSUE, LIVE):
            self._again.setdefault(prompt_id, len(self.begun))

    def _on_dropped(self, message: GroupDropped, _record: Record) -> None:
        self._count(message.prompt_id, message.rewards)

    def _on_packed(self, message: BatchPacked, record: Record) -> None:
        self._ended.step = max(self._ended.step, message.step)
        for group in message.new_groups:
            self._count(group.prompt_id, group.scores)
        if self._opening.config is not None:
            config, name = self._opening.settings_at(record.time_ns), ""
            if message.stage == "rl" and (name := self._check_stage(message)) != (message.objective.stage or ""):
                return
            if message.step > -config.warmup.steps:
                self._check_objective(message, config, name)

    def _count(self, prompt_id: str, scores: list[float]) -> None:
        """Take note of a group that ended, and of the stage whose condition holds now."""
        if self._opening.config is None:
            return
        self._schedule = self._schedule or Schedule(self._opening.config)
        self._schedule.count(self._ended, prompt_id, scores)
        self._due = self._due or self._schedule.due(self._ended, self.begun)

    def _check_stage(self, message: BatchPacked) -> str:
        """Compare the stage that a batch follows with its prompts; returns the one that it should follow."""
        begun, found = self.begun, message.objective.stage or "(none)"
        self._packed = max([self._packed, *(self._stages_before(group.prompt_id) for group in message.groups)])
        name = begun[self._packed - 1][1] if self._packed else ""
        if found != (name or "(none)"):
            expected = f"{name or '(none)'}, by its newest prompt"
            self._violations.add("wrong stage", f"batch {message.step}", f"the objective of stage {found}", expected)
        return name

    def _check_objective(self, message: BatchPacked, config: Config, stage: str) -> None:
        """Compare the objective of a batch with that of the settings; options of a user's loss may be others by now."""
        if any(table.loaded(name) is None for table, name in algorithms_of(config)):
            return
        expected = objective_of(config, message.step, stage)
        given, found = msgspec.structs.asdict(expected), msgspec.structs.asdict(message.objective)
        if (loss := LOSSES.loaded(expected.loss)) is not None:  # an older version of asyncrl knew fewer options
            found["loss_options"] = msgspec.to_builtins(loss()) | found["loss_options"]
        compared = given.keys() - ({"loss_options"} if ":" in expected.loss else set())
        if wrong := sorted(field for field in compared if found[field] != given[field]):
            texts = (", ".join(f"{field} {of[field]!r}" for field in wrong) for of in (found, given))
            name = f"stage {stage}" if stage else "the run"
            other, own = texts
            self._violations.add("wrong objective", f"batch {message.step}", other, f"{own}, by the settings of {name}")

    def _stages_before(self, prompt_id: str) -> int:
        """Stages that had begun when a prompt was issued."""
        if prompt_id in self._again:
            return self._again[prompt_id]
        number = number_of(prompt_id)
        return sum(first <= number for first, _ in self.begun) if letter_of(prompt_id) == TASK else 0
