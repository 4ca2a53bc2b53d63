"""What a run's ledger proves: every trajectory has one end, every batch was trained once, every version is true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from asyncrl.ledger.ledger import Key, Ledger, Violation, end_text, key_of_member, versions_text
from topics.batches import BatchMember, BatchPacked, BatchTrained
from topics.topic import PROMPTS, TRAJECTORIES
from topics.trajectories import TrajectoryGraded
from topics.weights import CheckpointSaved

_HELD_BY = ("rollout", "reward", "buffer")  # who has what is open


class Queue(NamedTuple):
    """A work queue before the logs were read."""

    acknowledged: int  # everything up to this sequence
    newest: int = 0  # sequence of its stream's newest message
    held: int = 0  # messages up to there that wait or are under way, or more


class Findings(NamedTuple):
    """What an audit found."""

    violations: list[Violation]
    prompts: int
    issued: int  # attempts at trajectories
    trained: int
    packed: int  # in a batch that is not trained yet
    dropped: dict[str, int]  # by reason, alone or with their group
    open: dict[str, int]  # issued and without an end, by the role whose turn it is
    batches: int
    trained_batches: int
    line: int  # newest line of weights
    tokens_by_lag: dict[int, int]  # trained; -1 for supervised tokens
    versions: int  # published
    payloads: int  # results still stored
    unreadable: int  # messages; each is a dead letter too


def audit(ledger: Ledger, queues: Mapping[str, Queue], *, first_result: int = 0) -> Findings:
    """Compare the logs with each other.

    Args:
        ledger: of a run that goes on, effects were read before their causes (`batch.trained` before `batch.packed`
            before `prompt.issued`, tokens before `weights.published`), so that nothing refers to what was not read.
        queues: by the role that works them off.
        first_result: sequence of the oldest result before the logs were read: what was trimmed since is not lost.
    """
    checks = (
        _check_ends(ledger),
        _check_open(ledger, queues),
        _check_steps(ledger),
        _check_tokens(ledger),
        _check_missing(ledger, first_result),
        _check_order(ledger),
    )
    damaged = [found for place, found in ledger.damaged.items() if place not in ledger.buried]  # else it is named there
    damaged += [found for key, found in ledger.mislabelled.items() if key in ledger.issued]
    violations = [*ledger.violations, *damaged, *chain.from_iterable(checks)]
    states = Counter(_state(ledger, key) for key in ledger.issued)
    lags: Counter[int] = Counter()
    for trained in ledger.trained.values():
        lags.update(trained.lags)
    return Findings(
        violations=violations,
        prompts=len(ledger.sizes),
        issued=len(ledger.issued),
        trained=states.pop("trained", 0),
        packed=states.pop("packed", 0),
        open={role: states.pop(role) for role in _HELD_BY if role in states},
        dropped={state.removeprefix("dropped: "): count for state, count in sorted(states.items())},
        batches=len(ledger.batches),
        trained_batches=len(ledger.trained),
        line=max((line for line, _ in ledger.published), default=0),
        tokens_by_lag=dict(sorted(lags.items())),
        versions=len(ledger.published),
        payloads=len(ledger.stored),
        unreadable=ledger.unreadable,
    )


def _state(ledger: Ledger, key: Key) -> str:
    """`trained`, `packed`, `dropped: REASON`, or the role whose turn it is."""
    end = ledger.ends.get(key)
    if end is None:
        end = ledger.closed.get(key.prompt_id)
    if isinstance(end, int):
        if end not in ledger.trained:
            return "packed"
        return "dropped: skipped" if ledger.trained[end].skipped else "trained"
    if end is not None:
        return f"dropped: {end}"
    if key in ledger.grades or key in ledger.failed:
        return "buffer"
    return "reward" if key in ledger.generated else "rollout"


def _check_ends(ledger: Ledger) -> Iterator[Violation]:
    """Ends refer to what was issued, and what was issued has an end once its group was packed."""
    for key, end in ledger.ends.items():
        # What was dropped for its lag is to be issued again, and may be dropped before it is.
        foreseen = isinstance(end, str) and ledger.ends.get(Key(key.trajectory_id, key.attempt - 1)) == "lag"
        if key not in ledger.issued and not foreseen:
            yield Violation("never issued", str(key), end_text(end), "an issue before its end")
    prompts = {key.prompt_id for key in ledger.issued}
    for prompt_id, end in ledger.closed.items():
        if isinstance(end, str) and prompt_id not in prompts:
            yield Violation("never issued", prompt_id, f"{end_text(end)} as a group", "an issue before its end")
    for key in ledger.issued:
        packed = ledger.closed.get(key.prompt_id)
        if key not in ledger.ends and isinstance(packed, int):
            yield Violation("no end", str(key), f"its group is in batch {packed} without it", "an end of its own")


def _check_order(ledger: Ledger) -> Iterator[Violation]:
    """Prompts are issued in their order, each with all its members: none is left out before the newest."""
    issued: dict[str, set[int]] = {}
    for key in ledger.signed or ledger.issued:  # what others put on the log has no order
        issued.setdefault(key.prompt_id, set()).add(int(key.trajectory_id.rsplit("-", 1)[1]))
    for letter, first in (("w", 0), ("p", ledger.first_prompt)):
        newest = max((int(name[1:]) for name in issued if name.startswith(letter)), default=first)
        for name in (f"{letter}{number:06d}" for number in range(first, newest)):
            if len(issued.get(name, ())) != ledger.sizes.get(name, 1):
                found = f"{len(issued.get(name, ()))} members issued, and prompts after it"
                yield Violation("left out", name, found, "all members of every prompt before the newest")


def _check_open(ledger: Ledger, queues: Mapping[str, Queue]) -> Iterator[Violation]:
    """What is open is in somebody's hands: its work was not acknowledged before something came of it."""
    expected = "a result or a failure before the acknowledgement"
    open_now: Counter[str] = Counter()
    for key, issued in ledger.issued.items():
        role = _state(ledger, key)
        if role not in queues:
            continue
        stream, sequence = (PROMPTS.name, issued) if role == "rollout" else (TRAJECTORIES.name, ledger.generated[key])
        if (stream, sequence) in ledger.buried:
            continue
        if sequence <= queues[role].acknowledged:
            found = f"message {sequence} of {stream} is acknowledged and nothing came of it"
            yield Violation("lost", str(key), found, expected)
        elif sequence <= queues[role].newest:
            open_now[role] += 1
    for role, count in open_now.items():
        if count > queues[role].held:  # which of them nobody can tell: a queue names what it holds by number only
            found = f"{count:,} trajectories are its turn, and it holds work for {queues[role].held:,}"
            yield Violation("lost", f"queue {role}", found, expected)


def _check_steps(ledger: Ledger) -> Iterator[Violation]:
    """Training begins with the first batch, and names the messages that hold its batches."""
    for log, first in (("packed", min(ledger.batches, default=None)), ("trained", min(ledger.trained, default=None))):
        if first is not None and ledger.first_step is not None and first != ledger.first_step:
            found, expected = f"the first batch {log}", f"batch {ledger.first_step} before it"
            yield Violation("step out of order", f"batch {first}", found, expected)
    said: list[tuple[BatchTrained | CheckpointSaved, str]] = []
    said += [(trained, f"trained on line {trained.line}") for trained in ledger.trained.values()]
    said += [(saved, f"in a checkpoint of line {saved.line}") for saved in ledger.checkpoints]
    for message, where in said:
        packed = ledger.batches.get(message.step)
        if packed is None or packed[1] != message.batch_sequence:
            found = f"{where} from message {message.batch_sequence}"
            expected = f"message {packed[1]}" if packed is not None else "a batch of this step in the batch log"
            yield Violation("wrong batch", f"batch {message.step}", found, expected)
    for step, trained in ledger.trained.items():
        if step in ledger.batches:
            yield from _check_batch(ledger, ledger.batches[step][0], trained)


def _check_batch(ledger: Ledger, packed: BatchPacked, trained: BatchTrained) -> Iterator[Violation]:
    """What was trained is what was packed, and no token of it is beyond the bound."""
    name, members = f"batch {packed.step}", _members(packed)
    if (trained.stage, trained.trajectories) != (packed.stage, len(members)):
        found = f"{trained.trajectories} trajectories of stage {trained.stage} were trained"
        yield Violation("wrong batch", name, found, f"{len(members)} of stage {packed.stage}")
    bound = packed.step - 1 - packed.min_version
    if packed.stage == "rl" and ledger.max_lag is not None and bound > ledger.max_lag:
        found = f"min_version {packed.min_version}, for a lag of at most {bound}"
        yield Violation("beyond lag bound", name, found, f"at most {ledger.max_lag}, as the run was opened")
    grades = [_grade_of(ledger, member) for member in members]
    newest = max((count.version for grade in grades if grade for count in grade.versions), default=-1)
    repeated = any(line for line, _ in ledger.published)  # a later line may come by a step again
    if packed.stage == "rl" and newest >= packed.step and not repeated:
        yield Violation("unpublished version", name, f"tokens of version {newest}", f"{packed.step - 1} at most")
    sampled: Counter[int] = Counter()
    for count in (count for grade in grades if grade is not None for count in grade.versions):
        sampled[-1 if count.version < 0 else max(0, packed.step - 1 - count.version)] += count.tokens
    for lag, tokens in trained.lags.items():
        found = f"{tokens} trained tokens of lag {lag}"
        if packed.stage == "rl" and lag > bound:
            yield Violation("beyond lag bound", name, found, f"a lag of at most {bound}")
        elif tokens > sampled[lag] and None not in grades:
            yield Violation("more tokens than sampled", name, found, f"at most {sampled[lag]}")


def _check_tokens(ledger: Ledger) -> Iterator[Violation]:
    """Batches, grades and stored results name the same tokens, all of them sampled by published versions."""
    for packed, _ in ledger.batches.values():
        for member in _members(packed):
            if _grade_of(ledger, member) is None:
                key = key_of_member(member)
                given = " or ".join(_grade_text(grade) for grade in ledger.grades.get(key, []))
                yield Violation(
                    "not graded", str(key), f"{_grade_text(member)} in batch {packed.step}", given or "a grade"
                )
    versions = {version for _, version in ledger.published} | {-1}
    for key, grades in ledger.grades.items():
        for grade in grades if key in ledger.issued else []:  # a claim about what was never issued ends nothing
            for count in grade.versions:
                if count.version not in versions:
                    found = f"{count.tokens} tokens of version {count.version}"
                    yield Violation("unpublished version", str(key), found, f"one of the {len(versions) - 1} published")
            yield from _check_reference(ledger, key, grade)


def _check_reference(ledger: Ledger, key: Key, grade: TrajectoryGraded) -> Iterator[Violation]:
    """What was graded is what is stored, where it is still there; it must be for as long as it is needed."""
    reference, versions = grade.payload, versions_text(grade.versions)
    stored = ledger.stored.get(reference.sequence)
    if stored is None:
        return
    if (stored.key, stored.versions) != (key, versions):
        found = f"message {reference.sequence}, which holds {stored.key} with versions {stored.versions}"
        yield Violation("wrong reference", str(key), found, f"a result of its own with versions {versions}")
    elif stored.digest and (stored.digest, stored.size) != (reference.digest, reference.size):
        found = f"{stored.size} bytes of digest {stored.digest} in message {reference.sequence}"
        yield Violation("damaged payload", str(key), found, f"{reference.size} bytes of {reference.digest}")


def _check_missing(ledger: Ledger, first_result: int) -> Iterator[Violation]:
    """Tokens that are gone are needed no more: they were dropped, or the kept checkpoints contain them."""

    contained = ledger.kept_step

    def needed(key: Key, sequence: int) -> bool:
        if first_result <= sequence < ledger.trimmed:
            return False  # it was there when the audit began; why it could be trimmed since may not have been read
        end = ledger.ends.get(key, ledger.closed.get(key.prompt_id))
        if isinstance(end, int) and key in ledger.ends:
            return contained is None or end > contained
        return end is None

    for key, grades in ledger.grades.items():
        for sequence in {grade.payload.sequence for grade in grades} if key in ledger.issued else ():
            if sequence not in ledger.stored and sequence not in ledger.torn and needed(key, sequence):
                yield Violation(
                    "lost", str(key), f"message {sequence} is gone", "its tokens, until a checkpoint has them"
                )
    for sequence, (key, error) in ledger.torn.items():
        if key in ledger.issued and needed(key, sequence):
            yield Violation("damaged payload", str(key), error, "all chunks as they were stored")


def _members(packed: BatchPacked) -> list[BatchMember]:
    return [member for group in packed.groups for member in group.members]


def _grade_of(ledger: Ledger, member: BatchMember) -> TrajectoryGraded | None:
    """The grade that a batch took over, or None where there is no such grade."""
    for grade in ledger.grades.get(key_of_member(member), []):
        if (grade.payload, grade.reward) == (member.payload, member.reward):
            return grade
    return None


def _grade_text(grade: TrajectoryGraded | BatchMember) -> str:
    return f"reward {grade.reward:g} of message {grade.payload.sequence} (digest {grade.payload.digest})"
