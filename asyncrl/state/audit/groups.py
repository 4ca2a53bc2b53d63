"""The groups of a run: kept for as long as something of them is open, then compared and closed.

Memory follows from open groups, not from the length of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.state.audit.comparison import group_violations
from asyncrl.state.audit.group import (
    Claim,
    Drop,
    End,
    Group,
    Issue,
    Key,
    Rules,
    Stored,
    Together,
    digest_of,
    end_text,
    key_of_member,
    stored_of,
)
from asyncrl.state.audit.training import Batch, Training
from asyncrl.state.audit.violations import Kind, Violation, Violations, Writers
from topics.batches import BatchGroup, BatchMember, BatchPacked
from topics.evals import EvalScored
from topics.groups import GroupCompleted, GroupDropped, GroupGraded
from topics.ids import REISSUE, PromptIdSet, letter_of, number_of, prompt_of, stage_of
from topics.prompts import PromptIssued, PromptIssuedHeaders
from topics.trajectories import (
    TrajectoryDropped,
    TrajectoryFailed,
    TrajectoryGenerated,
    TrajectoryGeneratedHeaders,
    TrajectoryGraded,
    TrajectorySubmitted,
)

WHOLE = "all chunks as they were stored"


class Needed(NamedTuple):
    """A result that is not there, or not whole, although a batch or an open group names it."""

    name: str  # of its trajectory
    step: int | None  # of the batch; None while its group is open
    violation: Violation


class Groups(Fold):
    """All groups, of which those that have ended are names in few spans."""

    def __init__(self, training: Training, writers: Writers, violations: Violations, *, first_result: int) -> None:
        self.kept: dict[str, Group] = {}  # not closed
        self.stored: dict[int, Stored] = {}  # their results, by sequence
        self.sampled: dict[int, tuple[Key, int]] = {}  # an attempt and its tokens, by version
        self.needed: dict[int, Needed] = {}  # results that are not whole, by sequence
        self.unreadable: dict[int, str] = {}  # errors of bodies of the log of results, by sequence
        self.dropped: Counter[str] = Counter()  # attempts by reason
        self.evaluated = 0  # attempts that the score of an evaluation holds
        self.closed = PromptIdSet()  # prompts whose groups are closed
        self.prompts = self.issued = self.results = 0
        self.newest_issued: dict[str, int] = {}  # number by letter
        self.newest_packed: int | None = None  # step
        self.scored_ns = 0  # server's clock at the newest grade that the score of an evaluation holds
        self.newest_warmup = -1  # number of the newest prompt of the warm-up that is in a batch
        self.on_issue: Callable[[PromptIssued, str], None] | None = None  # takes each issue and the digest of its rows
        self._training, self._writers, self._violations = training, writers, violations
        self.batches: dict[int, Batch] = {}  # by step
        self._first_result = first_result  # sequence of the oldest result before the logs were read
        self._packed = PromptIdSet()  # closed and in a batch
        self._owed: set[Key] = set()  # attempts of closed groups that may have a result still
        self._again: dict[Key, End | None] = {}  # attempts of closed groups that may be issued still, with their end

    def finish(self) -> None:
        """Everything was read: compare open groups."""
        for group in self.kept.values():
            self._compare(group)

    def on_torn(self, record: Record, error: Exception) -> None:
        """A result without all chunks of its body."""
        headers = TrajectoryGeneratedHeaders.read(record.headers)
        key = Key(headers.trajectory_id, headers.attempt)
        self._group(key.prompt_id).torn[record.sequence] = (key, str(error))

    def on_packed(self, message: BatchPacked, batch: Batch) -> None:
        """Its members and groups end in it."""
        self.batches[batch.step] = batch
        self.newest_packed = batch.step
        for packed in message.groups:
            for member in packed.members:
                if (stage := stage_of(member.trajectory_id)) != batch.stage:
                    expected = f"a batch of stage {stage}, by its name"
                    self._violations.add("wrong stage", key_of_member(member), f"in {batch.name}", expected)
            if packed.prompt_id not in self.closed:
                rules = Rules(packed.task, packed.temperature, packed.estimator)
                self._group(packed.prompt_id).packed_rules = rules
            if packed.before:
                self._take_late(packed, batch)
                continue
            if packed.further and packed.prompt_id not in self.closed:
                self._group(packed.prompt_id).further = set(packed.further)
            self._close(packed.prompt_id, packed.members, batch.step)

    def _take_late(self, packed: BatchGroup, batch: Batch) -> None:
        """Members that continued after a batch took the others of their group."""
        name, found = packed.prompt_id, [*packed.before]
        taken = [] if name in self.closed else [*self._group(name).packed.values()]
        if found != taken:
            words = f"{len(found)} members of it in earlier batches, as {batch.name} has them"
            self._violations.add("wrong batch", name, words, f"{len(taken)}, as these batches have them")
        for member in packed.members:
            key = key_of_member(member)
            if name not in self.closed and key.member not in self._group(name).further:
                self._violations.add("in two batches", key, f"late in {batch.name}", "a member that continued")
            if self._end(key, batch.step):
                self._group(name).packed[key] = member
        if name not in self.closed:
            self._fold_if_whole(self._group(name))

    def _group(self, prompt_id: str) -> Group:
        group = self.kept.get(prompt_id)
        if group is None:
            group = self.kept[prompt_id] = Group(prompt_id)
        return group

    def _on_issued(self, message: PromptIssued | PromptIssuedHeaders, record: Record) -> None:
        key = Key(message.trajectory_id, message.attempt)
        letter, number = letter_of(key.prompt_id), number_of(key.prompt_id)
        if self._writers.owns(record):  # records that other actors put on the log have no order
            self.newest_issued[letter] = max(number, self.newest_issued.get(letter, number))
        if key.prompt_id in self.closed:
            self._issued_late(key, record)
            return
        group = self._group(key.prompt_id)
        if not group.issues:
            self.prompts += 1
            group.size, group.wanted = message.group_size, message.wanted
            group.rules = Rules(message.task, message.temperature, message.estimator)
            self._check_origin(group, message.origin)
            group.secrets = message.secrets
            group.purged = self._training.opening.is_purged(message.secrets)
        if group.stage == "eval" or not group.issues:
            group.issued_ns = record.time_ns
        if message.stage != group.stage:
            self._violations.add("wrong stage", key, f"issued for stage {message.stage}", f"{group.stage}, by its name")
        if key in group.issues:
            found = f"messages {group.issues[key].sequence} and {record.sequence}"
            self._violations.add("issued twice", key, found, "one issue an attempt")
            return
        self.issued += 1
        rows = None
        if isinstance(message, PromptIssued):
            rows = digest_of(message.rows)
            if self.on_issue is not None:
                self.on_issue(message, rows)
        group.issues[key] = Issue(record.sequence, message.min_version, rows)
        self._fold_if_whole(group)

    def _issued_late(self, key: Key, record: Record) -> None:
        """After its group was closed: only what the buffer wanted again before the group ended."""
        if key not in self._again:
            found = f"message {record.sequence}, after its group had ended"
            self._violations.add("issued twice", key, found, "one issue an attempt")
            return
        end = self._again.pop(key)
        self.issued += 1
        if isinstance(end, str):
            self.dropped[end] += 1
        else:
            self._violations.add("no end", key, f"its group is in batch {end} without it", "a separate end")

    def _check_origin(self, group: Group, origin: str) -> None:
        """The group of a request has its number and the row that was asked for; the others have no origin."""
        group.requested = self._training.evaluations.get(group.prompt_id)
        if group.stage == "eval" and group.requested is None:
            self._violations.add("wrong origin", group.prompt_id, "issued", "a request for this evaluation")
        requests, number = self._training.opening.origins, group.number
        asked = (requests[number] if number < len(requests) else None) if letter_of(group.prompt_id) == REISSUE else ""
        if origin != asked:
            expected = "a request" if asked is None else repr(asked)
            self._violations.add("wrong origin", group.prompt_id, f"issued again for {origin!r}", expected)

    def _on_generated(self, message: TrajectoryGenerated | TrajectoryGeneratedHeaders, record: Record) -> None:
        key = Key(message.trajectory_id, message.attempt)
        self.results += 1
        if key.prompt_id in self.closed:
            if key in self._owed:
                self._owed.discard(key)
            else:
                found = f"message {record.sequence}, after its group had ended"
                self._violations.add("generated twice", key, found, "one result an attempt")
        else:
            group = self._group(key.prompt_id)
            group.results.append(record.sequence)
            self.stored[record.sequence] = stored_of(key, message, record)
            before = group.generated.setdefault(key, record.sequence)
            if before != record.sequence:
                found = f"messages {before} and {record.sequence}"
                self._violations.add("generated twice", key, found, "one result an attempt")
            self._fold_if_whole(group)

    def _on_submitted(self, message: TrajectorySubmitted, _record: Record) -> None:
        if message.prompt_id not in self.closed:
            self._group(message.prompt_id).submitted.add(Key(message.trajectory_id, message.attempt))

    def _on_completed(self, message: GroupCompleted, record: Record) -> None:
        """One call is to grade some members: each once."""
        name = prompt_of(message.group_id)
        if name in self.closed:
            return
        group = self._group(name)
        group.completed_ns = max(group.completed_ns, record.time_ns)
        keys = tuple(Key(member.trajectory_id, member.attempt) for member in message.members)
        together = Together(message.group_id, record.sequence, keys)
        for key in keys:
            if (before := group.completed.setdefault(key, together)) is not together:
                found = f"messages {before.sequence} and {record.sequence}"
                self._violations.add("completed twice", key, found, "one call for its group")

    def _on_group_graded(self, message: GroupGraded, record: Record) -> None:
        name = prompt_of(message.group_id)
        if name in self.closed:
            return
        scores = [grade.reward for grade in message.grades]
        if self._group(name).scores.setdefault(message.group_id, scores) is not scores:
            found = f"a second time, by message {record.sequence}"
            self._violations.add("second grade", message.group_id, found, "the scores of one call")

    def _on_graded(self, message: TrajectoryGraded, record: Record) -> None:
        self._claim(message, Claim(record.time_ns, message))

    def _on_failed(self, message: TrajectoryFailed, record: Record) -> None:
        self._claim(message, Claim(record.time_ns, None, message.reason))

    def _claim(self, message: TrajectoryGraded | TrajectoryFailed, claim: Claim) -> None:
        """A grade or a failure; one that comes after the end of its group ends nothing."""
        if message.prompt_id not in self.closed:
            group = self._group(message.prompt_id)
            group.claims.setdefault(Key(message.trajectory_id, message.attempt), []).append(claim)
            self._fold_if_whole(group)

    def _on_dropped(self, message: TrajectoryDropped, record: Record) -> None:
        key = Key(message.trajectory_id, message.attempt)
        if self._end(key, message.reason):
            self._group(key.prompt_id).drops[key] = self._drop(message.reason, record)
        if key.prompt_id not in self.closed:
            group = self._group(key.prompt_id)
            if message.again:
                group.again.add(key._replace(attempt=key.attempt + 1))
            self._fold_if_whole(group)

    def _on_group_dropped(self, message: GroupDropped, record: Record) -> None:
        name = message.prompt_id
        if not self._has_ended(name, name, message.reason):
            group = self._group(name)
            drop = self._drop(message.reason, record)._replace(scores=tuple(message.rewards))
            group.end, group.dropped = message.reason, drop
            self._fold_if_whole(group)

    def _on_scored(self, message: EvalScored, record: Record) -> None:
        """The members of an evaluation that were graded end in it."""
        if message.eval_id not in self.closed:
            group = self._group(message.eval_id)
            group.scored_ns = group.scored_ns or record.time_ns
        self._close(message.eval_id, message.members, msgspec.structs.replace(message, members=[]))

    def _drop(self, reason: str, record: Record) -> Drop:
        newest, first = self.newest_packed, self._training.opening.first_step
        return Drop(reason, record.time_ns, newest + 1 if newest is not None else (1 if first is None else first))

    def _close(self, prompt_id: str, members: Sequence[BatchMember], end: int | EvalScored) -> None:
        """Note that a batch or a score holds a group: once, unless that is noted of its members already."""
        new = True
        for member in members:
            key = key_of_member(member)
            if self._end(key, end):
                self._group(key.prompt_id).packed[key] = member
            else:
                new = False
        if prompt_id in self.closed or self._group(prompt_id).end is not None:
            if new:
                self._has_ended(prompt_id, prompt_id, end)
            return
        group = self._group(prompt_id)
        group.end = end
        if group.stage == "warmup":
            self.newest_warmup = max(self.newest_warmup, group.number)
        self._fold_if_whole(group)

    def _end(self, key: Key, end: End) -> bool:
        """Note the end of an attempt; False if it had one before."""
        ended = self._has_ended(key, key.prompt_id, end)
        if not ended:
            self._group(key.prompt_id).ends[key] = end
        return not ended

    def _has_ended(self, id: Key | str, prompt_id: str, end: End) -> bool:
        """Return whether an attempt, or a group, had an end before, which it must not."""
        if prompt_id in self.closed:
            in_batch = prompt_id in self._packed
            text = "in a batch" if in_batch else "scored" if stage_of(prompt_id) == "eval" else "dropped"
        else:
            group = self._group(prompt_id)
            of_group = group.end if isinstance(group.end, str) or id == prompt_id else None
            before = group.ends.get(id, of_group) if isinstance(id, Key) else of_group
            if before is None:
                return False
            in_batch, text = isinstance(before, int), end_text(before)
        kind: Kind = "in two batches" if in_batch and isinstance(end, int) else "ended twice"
        self._violations.add(kind, id, f"{text}, then {end_text(end)}", "one end")
        return True

    def _fold_if_whole(self, group: Group) -> None:
        """Compare a group that has ended, once all that its end is about was read, and keep nothing of it."""
        if group.end is None or not group.whole or not all(map(self._is_read, group.packed.values())):
            return
        self._compare(group)
        self.closed.add(group.prompt_id)
        if isinstance(group.end, int):
            self._packed.add(group.prompt_id)
        elif isinstance(group.end, EvalScored):
            claimed = (group.claims[key][0].time_ns for key in group.packed if key in group.claims)
            self.scored_ns = max(self.scored_ns, *claimed, 0)
        graded = {key for key, claims in group.claims.items() if any(claim.grade for claim in claims)}
        self._owed |= (group.issues.keys() | group.again) - group.generated.keys() - graded
        self._again |= {key: group.end_of(key) for key in group.again - group.issues.keys()}
        for sequence in group.results:
            del self.stored[sequence]
        del self.kept[group.prompt_id]

    def _is_read(self, member: BatchMember) -> bool:
        """Return whether the result that a batch names was read, or gone before."""
        return member.payload.sequence < self._first_result or member.payload.sequence in self.stored

    def _compare(self, group: Group) -> None:
        config, one_lineage = self._training.opening.config, not self._training.lineage
        self._violations += group_violations(group, self.batches, self.stored, config, one_lineage=one_lineage)
        for key, member in group.packed.items():
            step, grade = group.ends[key], group.used(key, member)
            if not isinstance(step, int):
                continue  # an evaluation, which is compared with its members alone
            if grade is None:
                self.batches[step].unknown = True
            else:
                self.batches[step].count(grade, group.secrets)
        for key in group.issues:
            end = group.end_of(key)
            if isinstance(end, int):
                self.batches[end].ended += 1
            elif isinstance(end, EvalScored):
                self.evaluated += 1
            elif end is not None:
                self.dropped[end] += 1
        self._look_for_results(group)

    def _look_for_results(self, group: Group) -> None:
        """Versions that sampled, and results that are named and not there."""
        for key, claims in group.claims.items():
            for grade in [claim.grade for claim in claims if claim.grade is not None and key in group.issues]:
                for count in grade.versions:
                    self.sampled.setdefault(count.version, (key, count.tokens))
                sequence = grade.payload.sequence
                if (error := self.unreadable.get(sequence)) is not None:
                    self._violations.add("damaged payload", key, error, "a result that its reward worker could read")
                elif sequence not in self.stored and sequence not in group.torn and key not in group.generated:
                    found = f"message {sequence} is gone"
                    expected = "its tokens, until a checkpoint has them"
                    self._need(group, key, sequence, Violation("lost", str(key), found, expected))
        for sequence, (key, error) in group.torn.items():
            if key in group.issues:
                self._need(group, key, sequence, Violation("damaged payload", str(key), error, WHOLE))

    def _need(self, group: Group, key: Key, sequence: int, violation: Violation) -> None:
        """Note an incomplete result, if it may be needed."""
        end, contained = group.end_of(key), self._training.contained
        step = end if isinstance(end, int) and key in group.ends else None
        if end is None or (step is not None and (contained is None or step > contained)):
            self.needed[sequence] = Needed(key.trajectory_id, step, violation)
