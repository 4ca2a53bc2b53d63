"""A batch of the audit: what its members sampled, compared with what was trained of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np

from asyncrl.bus.log import Record
from asyncrl.state.audit.opening import Opening
from asyncrl.state.audit.training import Trained
from asyncrl.state.audit.violations import Kind, Violation
from topics.batches import BatchPacked
from topics.trajectories import TrajectoryGraded


class Batch:
    """The part of a `batch.packed` that is kept once its members are counted."""

    __slots__ = (
        "ended",
        "groups",
        "mean",
        "min_version",
        "newest",
        "sampled",
        "sequence",
        "spread",
        "stage",
        "stale",
        "step",
        "time_ns",
        "trajectories",
        "unknown",
    )

    def __init__(self, packed: BatchPacked, record: Record) -> None:
        rewards = [member.reward for group in packed.groups for member in group.members]
        self.step, self.stage, self.min_version = packed.step, packed.stage, packed.min_version
        self.sequence, self.time_ns = record.sequence, record.time_ns
        self.groups, self.trajectories = len(packed.groups), len(rewards)
        self.mean = float(np.mean(rewards)) if rewards else 0.0
        self.spread = float(np.std(rewards)) if rewards else 0.0
        self.sampled: dict[int, int] = {}  # tokens by lag that no member may keep back; -1 for supervised tokens
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
        for version, tokens in ((count.version, count.tokens) for count in grade.versions):
            self.newest = max(self.newest, version)
            if 0 <= version < self.min_version:
                self.stale += tokens
            else:
                lag = -1 if version < 0 else max(0, self.step - 1 - version)
                self.sampled[lag] = self.sampled.get(lag, 0) + tokens

    def own_violations(self, opening: Opening, *, one_lineage: bool) -> Iterator[Violation]:
        """Return what is wrong with the batch alone.

        Args:
            one_line: whether no lineage ended: a later one may come by a step again.
        """
        max_lag, groups = opening.max_lag, opening.batch_groups(self.stage)
        if groups is not None and self.groups != groups:
            yield Violation("wrong size", self.name, f"{self.groups} groups", f"{groups}, as the run was opened")
        stage = "warmup" if self.step <= 0 else "rl"
        if self.stage != stage:
            yield Violation("wrong stage", self.name, f"packed for stage {self.stage}", f"{stage}, by its step")
        if max_lag is not None and self.min_version != (least := self.step - 1 - max_lag):
            kind: Kind = "beyond lag bound" if self.min_version < least else "wrong bound"
            found = f"min_version {self.min_version}, for a lag of at most {self.step - 1 - self.min_version}"
            yield Violation(kind, self.name, found, f"{least}, for {max_lag} as the run was opened")
        if self.newest >= max(self.step, 1) and one_lineage:
            found = f"tokens of version {self.newest}"
            yield Violation("unpublished version", self.name, found, f"{self.step - 1} at most")

    def violations(self, trained: Trained) -> Iterator[Violation]:
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
        if not _near(trained.rewards, (self.mean, self.spread)):
            found = f"rewards with mean and deviation {', '.join(f'{value:g}' for value in trained.rewards)}"
            yield Violation("wrong rewards", self.name, found, f"{self.mean:g}, {self.spread:g} of its members")
        if not trained.skipped:
            yield from self._token_violations(trained)
        elif tokens := sum(trained.lags.values()) + trained.masked:
            found = f"{tokens} tokens of a batch that was passed over"
            yield Violation("more tokens than sampled", self.name, found, "none")

    def _token_violations(self, trained: Trained) -> Iterator[Violation]:
        bound = self.step - 1 - self.min_version
        beyond = {lag: tokens for lag, tokens in trained.lags.items() if lag > bound and self.stage == "rl"}
        for lag, tokens in beyond.items():
            found = f"{tokens} trained tokens of lag {lag}"
            yield Violation("beyond lag bound", self.name, found, f"a lag of at most {bound}")
        if beyond:
            return
        surplus = Counter(trained.lags)
        surplus.subtract(self.sampled)
        for lag, tokens in surplus.items():
            if tokens:
                found = f"{trained.lags.get(lag, 0)} trained tokens of lag {lag}"
                expected = f"{self.sampled.get(lag, 0)}, as its members sampled them"
                yield Violation(_kind_of(tokens), self.name, found, expected)
        if trained.masked != self.stale:
            found = f"{trained.masked} tokens masked for their age"
            expected = f"{self.stale}, as its members sampled them"
            yield Violation(_kind_of(trained.masked - self.stale), self.name, found, expected)


def _kind_of(surplus: int) -> Kind:
    return "more tokens than sampled" if surplus > 0 else "fewer tokens than sampled"


def _near(found: tuple[float, ...], expected: tuple[float, ...]) -> bool:
    return len(found) == len(expected) and all(
        math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9) for one, other in zip(found, expected, strict=True)
    )
