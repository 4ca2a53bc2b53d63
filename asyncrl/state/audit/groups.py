"""The groups of a run: kept for as long as something of them is open, then compared and folded away.

Memory follows from what is open and not from how long the run is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from asyncrl.bus.log import Record
from asyncrl.state.audit.batch import Batch
from asyncrl.state.audit.causes import drop_violations
from asyncrl.state.audit.comparison import group_violations, versions_text
from asyncrl.state.audit.group import Claim, Drop, End, Group, Issue, Key, Score, Stored, end_text, key_of_member
from asyncrl.state.audit.training import Training
from asyncrl.state.audit.violations import Kind, Violation, Violations
from asyncrl.state.audit.writers import Writers
from topics.batches import BatchMember, BatchPacked
from topics.evals import EvalScored
from topics.groups import GroupDropped
from topics.ids import PromptIdSet, stage_of
from topics.prompts import PromptIssued, PromptRow
from topics.topic import PROMPTS, TRAJECTORIES
from topics.trajectories import (
    TrajectoryDropped,
    TrajectoryFailed,
    TrajectoryGenerated,
    TrajectoryGraded,
    count_versions,
)

WHOLE = "all chunks as they were stored"


class Needed(NamedTuple):
    """A result that is not there, or not whole, although a batch or an open group names it."""

    key: Key
    step: int | None  # of the batch; None while its group is open
    violation: Violation


class Groups:
    """All groups, of which those that have ended are names in few spans."""

    def __init__(
        self, training: Training, writers: Writers, violations: Violations, *, first_result: int, last_result: int
    ) -> None:
        """
        Args:
            first_result: sequence of the oldest result before the logs were read.
            last_result: of the newest one that will be read, if not of a later one.
        """
        self.kept: dict[str, Group] = {}  # not folded away
        self.stored: dict[int, Stored] = {}  # their results, by sequence
        self.legible: set[tuple[str, int]] = set()  # issues and results of these groups whose body could be read
        self.sampled: dict[int, tuple[Key, int]] = {}  # an attempt and its tokens, by version
        self.needed: dict[int, Needed] = {}  # results that are not whole, by sequence
        self.dropped: Counter[str] = Counter()  # attempts by reason
        self.evaluated = 0  # attempts that the score of an evaluation holds
        self.folded = PromptIdSet()  # prompts whose groups are folded away
        self.prompts = self.issued = self.results = 0
        self.newest_issued: dict[str, int] = {}  # number by letter
        self.newest_packed: int | None = None  # step
        self.newest_warmup = -1  # number of the newest prompt of the warm-up that is in a batch
        self.on_issue: Callable[[PromptIssued, str], None] | None = None  # takes each issue and the digest of its rows
        self._training, self._writers, self._violations = training, writers, violations
        self.batches: dict[int, Batch] = {}  # by step
        self._last_result = last_result
        self._newest_result = max(0, first_result - 1)  # sequence up to which results were read
        self._packed = PromptIdSet()  # folded and in a batch
        self._owed: set[Key] = set()  # attempts of folded groups that may have a result still
        self._again: dict[Key, End | None] = {}  # attempts of folded groups that may be issued still, with their end
        self._waiting: deque[Group] = deque()  # until the results are read as far as their batch names them

    def finish(self) -> None:
        """All was read: compare what is not folded away."""
        for group in self.kept.values():
            self._compare(group)

    def on_torn(self, record: Record, error: Exception) -> None:
        """A result without all chunks of its body."""
        key = _key_of(record)
        self._newest_result = max(self._newest_result, record.sequence)
        self._group(key.prompt_id).torn[record.sequence] = (key, str(error))

    def on_packed(self, message: BatchPacked, batch: Batch) -> None:
        """Its members and groups end in it."""
        self.batches[batch.step] = batch
        self.newest_packed = batch.step
        for packed in message.groups:
            new = [self._pack(member, batch.step) for member in packed.members]
            self._close(packed.prompt_id, batch.step, reported=not all(new))

    def _group(self, prompt_id: str) -> Group:
        group = self.kept.get(prompt_id)
        if group is None:
            group = self.kept[prompt_id] = Group(prompt_id)
        return group

    def on_issued(self, message: PromptIssued | None, record: Record) -> None:
        """An attempt at a trajectory; the message is None where only headers are read."""
        key, headers = _key_of(record), record.headers
        letter, number = key.prompt_id[0], int(key.prompt_id[1:])
        if self._writers.owns(record):  # records that other actors put on the log have no order
            self.newest_issued[letter] = max(number, self.newest_issued.get(letter, number))
        if key.prompt_id in self.folded:
            self._on_issued_late(key, record)
            return
        group = self._group(key.prompt_id)
        if not group.issues:
            self.prompts += 1
            group.size = int(headers["group-size"])
            self._check_origin(group, headers.get("origin", ""))
        if group.stage == "eval" or not group.issues:
            group.issued_ns = record.time_ns
        if headers["stage"] != group.stage:
            self._violations.add(
                "wrong stage", key, f"issued for stage {headers['stage']}", f"{group.stage}, by its name"
            )
        if key in group.issues:
            found = f"messages {group.issues[key].sequence} and {record.sequence}"
            self._violations.add("issued twice", key, found, "one issue an attempt")
            return
        self.issued += 1
        rows = None
        if message is not None:
            self.legible.add((record.stream.name, record.sequence))
            rows = digest_of(message.rows)
            if self.on_issue is not None:
                self.on_issue(message, rows)
        group.issues[key] = Issue(record.sequence, int(headers["min-version"]), rows)
        self._fold_if_whole(group)

    def _on_issued_late(self, key: Key, record: Record) -> None:
        """After its group was folded away: only what the buffer wanted again before the group ended."""
        if key not in self._again:
            found = f"message {record.sequence}, after its group had ended"
            self._violations.add("issued twice", key, found, "one issue an attempt")
            return
        end = self._again.pop(key)
        self.issued += 1
        if isinstance(end, str):
            self.dropped[end] += 1
        else:
            self._violations.add("no end", key, f"its group is in batch {end} without it", "an end of its own")

    def _check_origin(self, group: Group, origin: str) -> None:
        """The group of a request has its number and the row that was asked for; the others have no origin."""
        if group.stage == "eval" and group.prompt_id not in self._training.evaluations:
            self._violations.add("wrong origin", group.prompt_id, "issued", "a request for this evaluation")
        requests, number = self._training.opening.origins, group.number
        asked = (requests[number] if number < len(requests) else None) if group.prompt_id.startswith("r") else ""
        if origin != asked:
            expected = "a request" if asked is None else repr(asked)
            self._violations.add("wrong origin", group.prompt_id, f"issued again for {origin!r}", expected)

    def on_generated(self, message: TrajectoryGenerated | None, record: Record) -> None:
        """A result; the message is None where only headers are read."""
        key, versions = _key_of(record), record.headers["versions"]
        self.results += 1
        self._newest_result = max(self._newest_result, record.sequence)
        if key.prompt_id in self.folded:
            if key in self._owed:
                self._owed.discard(key)
            else:
                found = f"message {record.sequence}, after its group had ended"
                self._violations.add("generated twice", key, found, "one result an attempt")
        else:
            group = self._group(key.prompt_id)
            group.results.append(record.sequence)
            self.stored[record.sequence] = _stored(key, versions, message, record)
            if message is not None:
                self.legible.add((record.stream.name, record.sequence))
            before = group.generated.setdefault(key, record.sequence)
            if before != record.sequence:
                found = f"messages {before} and {record.sequence}"
                self._violations.add("generated twice", key, found, "one result an attempt")
        while self._waiting and not self._awaits_results(self._waiting[0]):
            self._fold_if_whole(self._waiting.popleft())

    def on_claim(self, message: TrajectoryGraded | TrajectoryFailed, record: Record) -> None:
        """A grade or a failure."""
        if message.prompt_id in self.folded:
            return  # it came late and ends nothing
        group = self._group(message.prompt_id)
        if isinstance(message, TrajectoryFailed):
            claim = Claim(record.time_ns, None, message.reason)
        else:
            claim = Claim(record.time_ns, message)
        group.claims.setdefault(Key(message.trajectory_id, message.attempt), []).append(claim)
        self._fold_if_whole(group)

    def on_dropped(self, message: TrajectoryDropped, record: Record) -> None:
        """The end of an attempt alone."""
        key = Key(message.trajectory_id, message.attempt)
        if key.prompt_id in self.folded:
            self._add_second_end(key, key.prompt_id, end_text(message.reason))
            return
        group = self._group(key.prompt_id)
        if self._end(group, key, message.reason):
            group.drops[key] = self._drop(message.reason, record)
        if message.again:
            group.again.add(key._replace(attempt=key.attempt + 1))
        self._fold_if_whole(group)

    def on_group_dropped(self, message: GroupDropped, record: Record) -> None:
        """The end of a group without a batch."""
        name = message.prompt_id
        if name in self.folded:
            self._add_second_end(name, name, f"{end_text(message.reason)} as a group")
            return
        group = self._group(name)
        if group.end is not None:
            found = f"{end_text(group.end)}, then {end_text(message.reason)} as a group"
            self._violations.add("ended twice", name, found, "one end")
            return
        group.end, group.dropped = message.reason, self._drop(message.reason, record)
        self._fold_if_whole(group)

    def on_scored(self, message: EvalScored, record: Record) -> None:
        """The members of an evaluation that were graded end in it."""
        name = message.eval_id
        if name in self.folded:
            self._add_second_end(name, name, f"evaluation {name}")
            return
        group, versions = self._group(name), message.versions
        score = Score(name, record.time_ns, message.accuracy, message.prompts, message.failed, versions)
        if group.end is not None:
            self._add_ends(name, group.end, score)
            return
        for member in message.members:
            if self._end(group, key_of_member(member), score):
                group.packed[key_of_member(member)] = member
        group.end = score
        self._fold_if_whole(group)

    def _drop(self, reason: str, record: Record) -> Drop:
        newest, first = self.newest_packed, self._training.opening.first_step
        return Drop(reason, record.time_ns, newest + 1 if newest is not None else (1 if first is None else first))

    def _pack(self, member: BatchMember, step: int) -> bool:
        """Note a member of a batch; False where it had an end before."""
        key = key_of_member(member)
        if key.prompt_id in self.folded:
            self._add_second_end(key, key.prompt_id, end_text(step), step=step)
            return False
        group = self._group(key.prompt_id)
        if group.stage != self.batches[step].stage:
            expected = f"a batch of stage {group.stage}, by its name"
            self._violations.add("wrong stage", key, f"in {self.batches[step].name}", expected)
        if not self._end(group, key, step):
            return False
        group.packed[key] = member
        return True

    def _close(self, prompt_id: str, step: int, *, reported: bool) -> None:
        """Note that a batch holds a group; `reported`: an earlier end is recorded already."""
        if prompt_id in self.folded:
            if not reported:
                self._add_second_end(prompt_id, prompt_id, end_text(step), step=step)
            return
        group = self._group(prompt_id)
        if group.end is None:
            group.end = step
            if group.stage == "warmup":
                self.newest_warmup = max(self.newest_warmup, group.number)
            self._fold_if_whole(group)
        elif not reported:
            self._add_ends(prompt_id, group.end, step)

    def _end(self, group: Group, key: Key, end: End) -> bool:
        """Note an end; False where there was one before."""
        if key in group.ends:
            self._add_ends(key, group.ends[key], end)
            return False
        if isinstance(group.end, str):
            self._add_ends(key, group.end, end)
            return False
        group.ends[key] = end
        return True

    def _add_ends(self, id: object, before: End, end: End) -> None:
        kind: Kind = "in two batches" if isinstance(before, int) and isinstance(end, int) else "ended twice"
        self._violations.add(kind, id, f"{end_text(before)}, then {end_text(end)}", "one end")

    def _add_second_end(self, id: object, prompt_id: str, found: str, *, step: int | None = None) -> None:
        """An end of what was folded away."""
        kind: Kind = "in two batches" if step is not None and prompt_id in self._packed else "ended twice"
        otherwise = "scored" if stage_of(prompt_id) == "eval" else "dropped"
        before = "in a batch" if prompt_id in self._packed else otherwise
        self._violations.add(kind, id, f"{before}, then {found}", "one end")

    def _fold_if_whole(self, group: Group) -> None:
        """Compare a group that has ended, once all that its end is about was read, and keep nothing of it."""
        if group.end is None or not group.whole or self.kept.get(group.prompt_id) is not group:
            return
        if self._awaits_results(group):
            self._waiting.append(group)
            return
        self._compare(group)
        self.folded.add(group.prompt_id)
        if isinstance(group.end, int):
            self._packed.add(group.prompt_id)
        graded = {key for key, claims in group.claims.items() if any(claim.grade for claim in claims)}
        self._owed |= (group.issues.keys() | group.again) - group.generated.keys() - graded
        self._again |= {key: group.end_of(key) for key in group.again - group.issues.keys()}
        for sequence in group.results:
            del self.stored[sequence]
            self.legible.discard((TRAJECTORIES.name, sequence))
        for issue in group.issues.values():
            self.legible.discard((PROMPTS.name, issue.sequence))
        del self.kept[group.prompt_id]

    def _awaits_results(self, group: Group) -> bool:
        """Return whether results that its batch names are still to be read."""
        return self._newest_result < min(group.newest_payload, self._last_result)

    def _compare(self, group: Group) -> None:
        one_lineage = not self._training.lineage
        self._violations += group_violations(group, self.batches, self.stored, one_lineage=one_lineage)
        self._violations += drop_violations(group, self._training.opening)
        for key, member in group.packed.items():
            step, grade = group.ends[key], group.used(key, member)
            if not isinstance(step, int):
                continue  # an evaluation, which is compared with its members alone
            if grade is None:
                self.batches[step].unknown = True
            else:
                self.batches[step].count(grade)
        for key in group.issues:
            end = group.end_of(key)
            if isinstance(end, int):
                self.batches[end].ended += 1
            elif isinstance(end, Score):
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
                if sequence not in self.stored and sequence not in group.torn and key not in group.generated:
                    found = f"message {sequence} is gone"
                    expected = "its tokens, until a checkpoint has them"
                    self._need(group, key, sequence, Violation("lost", str(key), found, expected))
        for sequence, (key, error) in group.torn.items():
            if key in group.issues:
                self._need(group, key, sequence, Violation("damaged payload", str(key), error, WHOLE))

    def _need(self, group: Group, key: Key, sequence: int, violation: Violation) -> None:
        """Note a result that is not whole, where it may be needed."""
        end, contained = group.end_of(key), self._training.contained
        step = end if isinstance(end, int) and key in group.ends else None
        if end is None or (step is not None and (contained is None or step > contained)):
            self.needed[sequence] = Needed(key, step, violation)


def _key_of(record: Record) -> Key:
    return Key(record.headers["trajectory"], int(record.headers["attempt"]))


def digest_of(rows: Sequence[PromptRow]) -> str:
    """Identity of rows; "" for none."""
    return str(xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(rows))) if rows else ""


def _stored(key: Key, versions: str, message: TrajectoryGenerated | None, record: Record) -> Stored:
    if message is None:
        return Stored(key, versions, "", 0)
    counted = versions_text(count_versions(message.segments))
    fault = f"tokens of versions {counted}" if counted != versions else ""
    digest = xxhash.xxh3_64_hexdigest(record.data)
    return Stored(key, versions, digest, len(record.data), fault, digest_of(message.rows))
