"""A batch of the audit: what its members sampled, compared with what was trained of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from asyncrl.state.audit.violations import Kind, Violation
from topics.batches import BatchPacked, BatchTrained
from topics.trajectories import TrajectoryGraded


class Batch:
    """The part of a `batch.packed` that is kept once its members are counted."""

    def __init__(self, packed: BatchPacked, record: Record) -> None:
        rewards = [member.reward for group in packed.groups for member in group.members]
        self.step, self.stage, self.min_version = packed.step, packed.stage, packed.min_version
        self.sequence, self.time_ns = record.sequence, record.time_ns
        self.groups, self.trajectories = len(packed.groups), len(rewards)
        self.rewards = [float(np.mean(rewards)), float(np.std(rewards))] if rewards else [0.0, 0.0]
        self.sampled: Counter[int] = Counter()  # tokens by lag that no member may keep back; -1 for supervised tokens
        self.stale = 0  # tokens older than `min_version`
        self.newest = -1  # version
        self.unknown = False  # a member without the grade that the batch names: nothing can be counted
        self.ended = 0  # issued trajectories whose end it is

    @property
    def name(self) -> str:
        """`batch 3`."""
        return f"batch {self.step}"

    def count(self, grade: TrajectoryGraded) -> None:
        """Add the tokens of a member."""
        for count in grade.versions:
            self.newest = max(self.newest, count.version)
            if 0 <= count.version < self.min_version:
                self.stale += count.tokens
            else:
                self.sampled[-1 if count.version < 0 else max(0, self.step - 1 - count.version)] += count.tokens

    def own_violations(self, config: Config | None, *, groups: int, one_lineage: bool) -> Iterator[Violation]:
        """Return what is wrong with the batch alone.

        Args:
            config: of the run, where it is known.
            groups: of a batch of RL, when it was packed.
            one_lineage: whether no lineage ended: a later one may come by a step again.
        """
        stage = "warmup" if self.step <= 0 else "rl"
        if self.stage != stage:
            yield Violation("wrong stage", self.name, f"packed for stage {self.stage}", f"{stage}, by its step")
        if config is not None:
            yield from self._setting_violations(config, groups)
        if self.newest >= max(self.step, 1) and one_lineage:
            found = f"tokens of version {self.newest}"
            yield Violation("unpublished version", self.name, found, f"{self.step - 1} at most")

    def _setting_violations(self, config: Config, of_rl: int) -> Iterator[Violation]:
        warmup, max_lag = config.warmup, config.buffer.max_lag
        of_warmup = warmup.batch_rows // warmup.rows_per_trajectory
        groups = of_rl if self.stage == "rl" else of_warmup
        if self.groups != groups:
            yield Violation("wrong size", self.name, f"{self.groups} groups", f"{groups}, as the run was opened")
        if self.min_version != (least := self.step - 1 - max_lag):
            kind: Kind = "beyond lag bound" if self.min_version < least else "wrong bound"
            found = f"min_version {self.min_version}, for a lag of at most {self.step - 1 - self.min_version}"
            yield Violation(kind, self.name, found, f"{least}, for {max_lag} as the run was opened")

    def violations(self, trained: BatchTrained) -> Iterator[Violation]:
        """Check that the packed tokens were trained: each sampled token once, unless masked for its age."""
        where = f"trained on lineage {trained.lineage} from message {trained.batch_sequence}"
        if trained.batch_sequence != self.sequence:
            yield Violation("wrong batch", self.name, where, f"message {self.sequence}")
        if trained.stage != self.stage:
            yield Violation("wrong stage", self.name, f"trained as stage {trained.stage}", f"{self.stage}, as packed")
        if trained.trajectories != self.trajectories:
            found = f"{trained.trajectories} trajectories were trained"
            yield Violation("wrong batch", self.name, found, f"{self.trajectories}, as packed")
        if self.unknown:
            return
        if len(trained.rewards) != 2 or not np.allclose(trained.rewards, self.rewards, rtol=1e-9, atol=1e-9):
            found = f"rewards with mean and deviation {trained.rewards}"
            yield Violation("wrong rewards", self.name, found, f"{self.rewards} of its members")
        if not trained.skipped:
            yield from self._token_violations(trained)
        elif tokens := sum(trained.lags.values()) + trained.masked:
            found = f"{tokens} tokens of a batch that was passed over"
            yield Violation("more tokens than sampled", self.name, found, "none")

    def _token_violations(self, trained: BatchTrained) -> Iterator[Violation]:
        bound = self.step - 1 - self.min_version
        beyond = {lag: tokens for lag, tokens in trained.lags.items() if lag > bound and self.stage == "rl"}
        for lag, tokens in beyond.items():
            found = f"{tokens} trained tokens of lag {lag}"
            yield Violation("beyond lag bound", self.name, found, f"a lag of at most {bound}")
        if beyond:
            return
        lags = sorted(trained.lags.keys() | self.sampled.keys())
        compared = [(f"trained tokens of lag {lag}", trained.lags.get(lag, 0), self.sampled[lag]) for lag in lags]
        for what, tokens, sampled in [*compared, ("tokens masked for their age", trained.masked, self.stale)]:
            if tokens != sampled:
                kind: Kind = "more tokens than sampled" if tokens > sampled else "fewer tokens than sampled"
                yield Violation(kind, self.name, f"{tokens} {what}", f"{sampled}, as its members sampled them")
