"""The learner's log: steps, versions and checkpoints, and its contradictions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.bus.publish import WRITER
from asyncrl.config.held_out import evaluated_sets
from asyncrl.config.settings import Config
from asyncrl.state.audit.opening import Opening
from asyncrl.state.audit.violations import Kind, Violation, Violations, place_of
from topics.actors import SkipRequested
from topics.batches import BatchPacked, BatchTrained
from topics.engines import EngineReady
from topics.evals import EvalRequested
from topics.trajectories import TrajectoryGraded
from topics.weights import (
    UNTRAINED,
    CheckpointLost,
    CheckpointRestored,
    CheckpointSaved,
    TrainingFinished,
    WeightsPublished,
    WeightsUnchanged,
)

_STALE = -2  # in place of a lag


class Saved(NamedTuple):
    """A checkpoint."""

    message: CheckpointSaved
    time_ns: int  # server's clock


class Repeated(NamedTuple):
    """A version with the weights of the version before, which no `weights.unchanged` announced."""

    name: str
    before: int  # version
    version: int
    lineage: int


class Training(Fold):
    """Folds the learner's log."""

    def __init__(self, opening: Opening, violations: Violations) -> None:
        self.trained: dict[tuple[int, int], BatchTrained] = {}  # without metrics, by lineage and step
        self.trained_ns: dict[tuple[int, int], int] = {}  # server's clock of each of them
        self.surviving: dict[int, BatchTrained] = {}  # by step, in the newest weights
        self.published: dict[tuple[int, int], str] = {}  # digest by lineage and version
        self.evaluations: dict[str, EvalRequested] = {}  # requests, by evaluation
        self.repeated: list[Repeated] = []
        self.checkpoints: list[Saved] = []
        self.contained: int | None = None  # batches up to this step were in all checkpoints kept: tokens may be gone
        self.lineage = 0  # the newest one
        self._sequences: dict[tuple[int, int], int] = {}  # of the steps in `trained`
        self._skips_ns: dict[int, int] = {}  # server's clock at the first request to skip a batch, by step
        self._newest: BatchTrained | None = None
        self._evaluated: dict[str, int] = {}  # newest version that an evaluation was requested for, by held-out set
        self._unchanged: set[tuple[int, int]] = set()  # lineage and version that a `weights.unchanged` announced
        self._last: tuple[str, WeightsPublished] | None = None  # newest version, and the process that wrote it
        self.opening = opening
        self._violations = violations

    @property
    def newest_step(self) -> int | None:
        """Step that was trained last; None before the first one."""
        return self._newest.step if self._newest is not None else None

    def _on_trained(self, message: BatchTrained, record: Record) -> None:
        """Steps follow each other; a newer lineage goes back, and what the older one trained from there on is lost."""
        step, lineage, last = message.step, message.lineage, self._newest
        before = self._sequences.setdefault((lineage, step), record.sequence)
        if before != record.sequence:
            found = f"messages {before} and {record.sequence} on lineage {lineage}"
            self._violations.add("trained twice", f"batch {step}", found, "once on a lineage")
            return
        self._check_lineage(lineage, f"batch {step}", "trained")
        if step > self._in_weights:
            self._check_evaluations(record)
        if last is not None:
            again = lineage > last.lineage and step <= last.step
            if not again and (step != last.step + 1 or lineage < last.lineage):
                found = f"trained on lineage {lineage} after batch {last.step} on lineage {last.lineage}"
                self._violations.add("step out of order", f"batch {step}", found, f"batch {last.step + 1}")
            if again:
                self.surviving = {number: kept for number, kept in self.surviving.items() if number < step}
        if message.skipped and record.time_ns < self._skips_ns.get(step, record.time_ns + 1):
            found = f"passed over in message {record.sequence}"
            self._violations.add("unasked skip", f"batch {step}", found, "a request to skip it before that")
        self._newest = msgspec.structs.replace(message, metrics={})
        self.trained_ns[lineage, step] = record.time_ns
        self.trained[lineage, step] = self.surviving[step] = self._newest

    def _on_finished(self, message: TrainingFinished, record: Record) -> None:
        """Training is over when its last step is trained."""
        self._check_evaluations(record)
        if message.step != self._in_weights:
            found = f"training is finished at step {message.step}"
            self._violations.add("step out of order", f"batch {message.step}", found, f"step {self._in_weights}")

    def _on_skip_requested(self, message: SkipRequested, record: Record) -> None:
        self._skips_ns.setdefault(message.step, record.time_ns)

    def _on_restored(self, message: CheckpointRestored, record: Record) -> None:
        """The batches after the checkpoint are skipped."""
        for step in range(message.step + 1, message.until + 1):
            self._skips_ns.setdefault(step, record.time_ns)
        self.checkpoints = [one for one in self.checkpoints if one.message.step <= message.step]

    def _on_eval_requested(self, message: EvalRequested, _: Record) -> None:
        """The prompter may issue held-out prompts."""
        self.evaluations[message.eval_id] = message
        self._evaluated[message.dataset] = message.version

    def _check_evaluations(self, record: Record) -> None:
        """The learner requests the evaluations of a version before it trains the next step.

        Both settings must want an evaluation where the run was opened again in between.
        """
        if self.opening.config is None:
            return
        version, times = self._in_weights, [record.time_ns]
        if self._newest is not None:
            times.append(self.trained_ns[self._newest.lineage, version])
        wanted = [evaluated_sets(self.opening.settings_at(time_ns), version) for time_ns in times]
        for name in wanted[0]:
            if name in wanted[-1] and self._evaluated.get(name, -1) < version:
                found = f"no request for an evaluation{f' on {name}' if name else ''}, and a later step is trained"
                self._violations.add("left out", f"version {version}", found, "an evaluation, by eval.every")

    def _on_unchanged(self, message: WeightsUnchanged, _: Record) -> None:
        self._unchanged.add((message.lineage, message.version))

    def _on_ready(self, message: EngineReady, record: Record) -> None:
        """An engine samples from the weights that were published, once all of the learner's log was read.

        Without a learner none are: the run serves the original model. Those with a second model have no other.
        """
        settings = self.opening.settings_at(record.time_ns)
        if message.key == UNTRAINED.key and (not settings.trains or settings.engine.group_of(message.engine_id).model):
            return
        published = self.published.get((message.lineage, message.version))
        if published != message.digest:
            found = f"{message.engine_id} is ready with digest {message.digest} as version {message.version}"
            expected = f"digest {published}, as published" if published else "a version that was published"
            self._violations.add("foreign weights", place_of(record), found, expected)

    def _on_published(self, message: WeightsPublished, record: Record) -> None:
        """A version contains the steps before it, and has one digest."""
        lineage, version = message.lineage, message.version
        name = f"version {version} of lineage {lineage}"
        before = self.published.setdefault((lineage, version), message.digest)
        if before != message.digest:
            self._violations.add("two digests", name, f"{before} and {message.digest}", "one digest a version")
            return
        self._check_lineage(lineage, name, "published")
        if version > self._in_weights:
            found = f"published when step {self._in_weights} was the newest one trained"
            self._violations.add("untrained version", name, found, f"batch {version} trained before it")
        self._check_repeated(name, message, record.headers.get(WRITER, ""))

    def _check_repeated(self, name: str, message: WeightsPublished, writer: str) -> None:
        """The learner announces a version that equals the one before, unless another process published that one."""
        last, self._last = self._last, (writer, message)
        if last is None or last[0] != writer or (message.lineage, message.version) in self._unchanged:
            return
        before = last[1]
        if before.lineage == message.lineage and before.version < message.version and before.digest == message.digest:
            self.repeated.append(Repeated(name, before.version, message.version, message.lineage))

    def _on_checkpoint(self, message: CheckpointSaved, record: Record) -> None:
        """A checkpoint holds the weights that were published for its step, on a lineage that there is."""
        lineage, step = message.lineage, message.step
        name = f"checkpoint of step {step} on lineage {lineage}"
        self.checkpoints.append(Saved(message, record.time_ns))
        kept = [saved.message.step for saved in self.checkpoints[-self.opening.keep_checkpoints :]]
        if len(kept) > 1 and not self.opening.keeps_tokens:
            self.contained = min(kept) if self.contained is None else max(self.contained, min(kept))
        # A lineage begins unpublished while steps are trained again, and where its first step is not published.
        begins = step < self._in_weights or not self.opening.publishes(step)
        if lineage > self.lineage + begins:
            self._violations.add(
                "unknown lineage", name, f"a lineage after {self.lineage}", "a lineage that trained or published"
            )
        elif step > self._in_weights:
            found = f"saved when step {self._in_weights} was the newest one trained"
            self._violations.add("wrong checkpoint", name, found, f"batch {step} trained before it")
        elif lineage <= self.lineage and self.opening.publishes(step):
            lineages = [one for one in range(lineage + 1) if (one, step) in self.published]
            published = self.published[max(lineages), step] if lineages else "not published"
            if published != message.digest:
                expected = f"that of its version: {published}"
                self._violations.add("wrong checkpoint", name, f"digest {message.digest}", expected)

    def _on_lost(self, message: CheckpointLost, _: Record) -> None:
        """An unreadable checkpoint no longer counts; messages trimmed before that need no other."""
        lost = (message.lineage, message.step)
        self.checkpoints = [one for one in self.checkpoints if (one.message.lineage, one.message.step) != lost]

    def skips(self, lineage: int, step: int) -> bool:
        """Return whether the weights of a lineage skip a batch: by the newest record of the step up to that lineage."""
        found = next((self.trained[one, step] for one in range(lineage, -1, -1) if (one, step) in self.trained), None)
        return found is not None and found.skipped

    @property
    def _in_weights(self) -> int:
        """Newest step that was trained, or the one that training begins with."""
        if self._newest is not None:
            return self._newest.step
        first = self.opening.first_step
        return first - 1 if first is not None else 0

    def _check_lineage(self, lineage: int, name: str, what: str) -> None:
        if not self.lineage <= lineage <= self.lineage + 1:
            expected = f"lineage {self.lineage}, or {self.lineage + 1} as the next one"
            self._violations.add("unknown lineage", name, f"{what} on lineage {lineage}", expected)
        self.lineage = max(lineage, self.lineage)


class Batch:
    """The part of a `batch.packed` that is kept once its members are counted."""

    def __init__(self, packed: BatchPacked, record: Record) -> None:
        rewards = [member.reward for group in packed.groups for member in group.members]
        self.step, self.stage, self.min_version = packed.step, packed.stage, packed.min_version
        self.sequence, self.time_ns = record.sequence, record.time_ns
        self.moves_policy = packed.objective.moves_policy
        self.groups, self.trajectories = len(packed.new_groups), len(rewards)
        self.rewards = [float(np.mean(rewards)), float(np.std(rewards))] if rewards else [0.0, 0.0]
        self.sampled: Counter[int] = Counter()  # tokens by lag that no member may keep back; -1 for supervised tokens
        self.stale = 0  # tokens older than `min_version`
        self.sealed: defaultdict[str, Counter[int]] = defaultdict(Counter)  # of both, by data keys; `_STALE` for these
        self.newest = -1  # version
        self.unknown = False  # a member without the grade that the batch names: nothing can be counted
        self.ended = 0  # issued trajectories whose end it is

    @property
    def name(self) -> str:
        """`batch 3`."""
        return f"batch {self.step}"

    def count(self, grade: TrajectoryGraded, secrets: str = "") -> None:
        """Add the tokens of a member, which are sealed under some data keys."""
        for count in grade.versions:
            self.newest = max(self.newest, count.version)
            lag = -1 if count.version < 0 else max(0, self.step - 1 - count.version)
            if 0 <= count.version < self.min_version:
                self.stale, lag = self.stale + count.tokens, _STALE
            else:
                self.sampled[lag] += count.tokens
            if secrets:
                self.sealed[secrets][lag] += count.tokens

    def purged(self, opening: Opening, before_ns: int) -> Counter[int]:
        """Return the tokens whose data keys were erased before a time of the server's clock, as in `sealed`: they may
        be missing in a step that was trained then.
        """
        found = [tokens for secrets, tokens in self.sealed.items() if opening.is_purged(secrets, before_ns)]
        return sum(found, Counter[int]())

    def own_violations(self, config: Config | None, *, groups: int, one_lineage: bool) -> Iterator[Violation]:
        """Return the faults of the batch alone.

        Args:
            config: of the run, if known.
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
        max_lag = config.buffer.max_lag
        groups = of_rl if self.stage == "rl" else config.warmup.batch_groups
        if self.groups != groups:
            yield Violation("wrong size", self.name, f"{self.groups} groups", f"{groups}, as the run was opened")
        if self.min_version != (least := self.step - 1 - max_lag):
            kind: Kind = "beyond lag bound" if self.min_version < least else "wrong bound"
            found = f"min_version {self.min_version}, for a lag of at most {self.step - 1 - self.min_version}"
            yield Violation(kind, self.name, found, f"{least}, for {max_lag} as the run was opened")

    def violations(self, trained: BatchTrained, purged: Counter[int]) -> Iterator[Violation]:
        """Check that the packed tokens were trained: each sampled token once, unless masked for its age, or purged."""
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
            yield from self._token_violations(trained, purged)
        elif tokens := sum(trained.lags.values()) + trained.masked:
            found = f"{tokens} tokens of a batch that was passed over"
            yield Violation("more tokens than sampled", self.name, found, "none")

    def _token_violations(self, trained: BatchTrained, purged: Counter[int]) -> Iterator[Violation]:
        bound = self.step - 1 - self.min_version
        beyond = {lag: tokens for lag, tokens in trained.lags.items() if lag > bound and self.stage == "rl"}
        for lag, tokens in beyond.items():
            found = f"{tokens} trained tokens of lag {lag}"
            yield Violation("beyond lag bound", self.name, found, f"a lag of at most {bound}")
        if beyond:
            return
        lags = sorted(trained.lags.keys() | self.sampled.keys())
        compared = [(f"trained tokens of lag {lag}", trained.lags.get(lag, 0), self.sampled[lag], lag) for lag in lags]
        masked = ("tokens masked for their age", trained.masked, self.stale, _STALE)
        for what, tokens, sampled, lag in [*compared, masked]:
            if not sampled - purged[lag] <= tokens <= sampled:
                kind: Kind = "more tokens than sampled" if tokens > sampled else "fewer tokens than sampled"
                yield Violation(kind, self.name, f"{tokens} {what}", f"{sampled}, as its members sampled them")
