"""The audit's verdict: each trajectory has one end or is open work, batches are trained once, versions are true."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from asyncrl.config.trainers import TrainerCapability, trainer_kind
from asyncrl.config.worker_pools import worker_pools
from asyncrl.state.audit.comparison import deadline_s
from asyncrl.state.audit.group import Group, Work
from asyncrl.state.audit.ledger import Ledger
from asyncrl.state.audit.violations import Violation
from topics.batches import BatchTrained
from topics.ids import EVALUATION, LIVE, TASK, WARMUP, prompt_name
from topics.table import BUILT_IN
from topics.topic import BATCHES
from topics.weights import CheckpointSaved

_LATE_S = 30.0  # for the buffer to act on a deadline


class Queue(NamedTuple):
    """A work queue before the logs were read. It names its messages by number only."""

    acknowledged: int  # everything up to this sequence
    delivered: int = 0  # the newest one handed out
    newest: int = 0  # sequence of its stream's newest message
    unacknowledged: int = 0  # messages handed out whose lease runs, or that are handed out again
    waiting: int = 0  # messages not handed out yet
    fault: str = ""  # how it differs from a queue that loses nothing


def is_finished(ledger: Ledger) -> bool:
    """Return whether the run has trained all its steps."""
    newest, steps = ledger.training.newest_step, ledger.opening.steps
    return newest is not None and steps is not None and newest >= steps


def open_violations(ledger: Ledger, queues: Mapping[str, Queue]) -> Iterator[Violation]:
    """Return work that is open and pending nowhere, or has been open too long."""
    for name, queue in queues.items():
        if queue.fault:
            expected = "all messages, explicit acknowledgements, deliveries without a limit, the lease of the run"
            yield Violation("wrong queue", f"queue {name}", queue.fault, expected)
    counts: Counter[tuple[str, str]] = Counter()
    config = ledger.opening.config
    tables = BUILT_IN.with_pools(worker_pools(config)) if config is not None else BUILT_IN
    for group in ledger.groups.kept.values():
        lost: list[Violation] = []
        for work in group.open():
            name = work.queue(tables, group.rules.task if group.rules else "")
            if name in queues:
                lost += _lost(ledger, queues[name], work)
                counts[name, _place(queues[name], work.sequence)] += 1
        yield from lost or _overdue(ledger, group)
    for name, queue in queues.items():
        for place, held in (("handed out", queue.unacknowledged), ("waiting", queue.waiting)):
            if (count := counts[name, place]) > held:
                found = f"{count:,} open trajectories are its turn, {place}; it holds {held:,} such messages"
                yield Violation("lost", f"queue {name}", found, _EXPECTED)


_EXPECTED = "a result or a failure before the acknowledgement"


def _place(queue: Queue, sequence: int) -> str:
    if sequence <= queue.acknowledged or sequence > queue.newest:
        return ""  # looked at one by one, or came after the queue was looked at
    return "handed out" if sequence <= queue.delivered else "waiting"


def _lost(ledger: Ledger, queue: Queue, work: Work) -> Iterator[Violation]:
    """Work that was acknowledged before anything came of it, and a dead letter that has no right to excuse that."""
    key, place = work.key, (work.stream, work.sequence)
    letter = ledger.letters.get(place)
    found = f"message {work.sequence} of {work.stream} is acknowledged and nothing came of it"
    if work.sequence > queue.acknowledged:
        return
    if letter is None:
        yield Violation("lost", str(key), found, _EXPECTED)
    elif place in ledger.legible and not letter.poison:
        found = f"{found}; its dead letter gives the reason {letter.reason[:120]!r}, and the message can be read"
        yield Violation("hidden loss", str(key), found, _EXPECTED)


def _overdue(ledger: Ledger, group: Group) -> Iterator[Violation]:
    """A group that the buffer ought to have ended."""
    if (group.end is not None and not group.continues) or not group.issues:
        return
    complete_ns = group.complete_ns()
    if group.stage == "eval" and complete_ns is not None:
        yield from _unscored(ledger, group, complete_ns)
    elif group.stage == "eval" and not group.issued:
        return  # its other members follow
    elif is_finished(ledger) and group.stage != "eval":
        state = "complete" if complete_ns is not None else "incomplete"
        found = f"{state} and without an end, and all steps are trained"
        yield Violation("left over", group.prompt_id, found, "a batch, or a separate end")
    elif group.stage == "warmup":
        if group.number < ledger.groups.newest_warmup:
            found = f"without an end, and prompt {ledger.groups.newest_warmup} of the warm-up is in a batch"
            yield Violation("left over", group.prompt_id, found, "batches of the warm-up in the order of the data")
    elif complete_ns is not None:
        yield from _passed_over(ledger, group, complete_ns)
    elif ledger.opening.config is not None:
        begun_ns = max(group.issued_ns, group.completed_ns, ledger.opening.opened_ns)
        late_s = (ledger.buffer_ns - begun_ns) / 1e9 - deadline_s(ledger.opening.config, group)
        if late_s > _LATE_S:
            found = f"open, and the buffer was there {late_s:,.0f} s after its deadline"
            yield Violation("overdue", group.prompt_id, found, "an end at its deadline")


def _unscored(ledger: Ledger, group: Group, complete_ns: int) -> Iterator[Violation]:
    """The buffer scores an evaluation once it is complete, in the order of the grades."""
    since_ns = max(complete_ns, ledger.writers.claimed_ns.get(BATCHES.name, 0))
    late_s = (ledger.buffer_ns - since_ns) / 1e9
    if complete_ns < ledger.groups.scored_ns or late_s > _LATE_S:
        found = f"complete and without a score, and the buffer was there {late_s:,.1f} s later"
        yield Violation("left over", group.prompt_id, found, "the score of this evaluation")


def _passed_over(ledger: Ledger, group: Group, complete_ns: int) -> Iterator[Violation]:
    """A complete group waits only for groups that were open with it.

    Admission allows (max_lag + 1) batches of open groups, so one of as many batches takes it; one more for groups that
    a restarted buffer completes in another order, so only batches of the newest writer count.
    """
    if ledger.opening.config is None:
        return
    max_lag = ledger.opening.config.buffer.max_lag
    since_ns = max(complete_ns, ledger.writers.claimed_ns.get(BATCHES.name, 0))
    passed = len(ledger.packed_ns) - bisect_right(ledger.packed_ns, since_ns)
    if passed > max_lag + 1:
        found = f"complete and without an end, and {passed} batches were packed without it"
        yield Violation("left over", group.prompt_id, found, f"one of the first {max_lag + 1}")


_ROLES = ("rollout", "reward", "groupreward", "buffer")  # holders of open work


class Findings(NamedTuple):
    """The findings of an audit."""

    violations: list[Violation]
    prompts: int
    issued: int  # attempts at trajectories
    trained: int
    packed: int  # in a batch that is not trained yet
    evaluated: int  # answers that the score of an evaluation holds
    dropped: dict[str, int]  # by reason, alone, with their group or with a batch that was skipped
    open: dict[str, int]  # issued and without an end, by the role whose turn it is
    batches: int
    trained_batches: int
    lineage: int  # newest lineage
    tokens_by_lag: dict[int, int]  # trained; -1 for supervised tokens
    versions: int  # published
    payloads: int  # results still stored
    unreadable: int  # messages; each is a dead letter too
    purged: int = 0  # messages whose data key was erased
    changed_inputs: Mapping[str, int] = {}  # path of each changed code or data file, and the newest step before that


def audit(ledger: Ledger, queues: Mapping[str, Queue]) -> Findings:
    """Compare the logs with each other, once all of them were read.

    Args:
        ledger: of a live run, no log was read further than the logs with the causes of its messages.
        queues: by the role that works them off.
    """
    ledger.finish()
    checks = (
        _left_out(ledger),
        open_violations(ledger, queues),
        _steps(ledger),
        _versions(ledger),
        ledger.channel.violations(ledger.training.published, ledger.later_versions),
        _missing_results(ledger),
    )
    violations = [*ledger.violations, *chain.from_iterable(checks)]
    training = ledger.training
    ended = {step: batch.ended for step, batch in ledger.batches.items()}
    taken = sum(ended.get(step, 0) for step in training.surviving)
    skipped = sum(ended.get(step, 0) for step, trained in training.surviving.items() if trained.skipped)
    dropped = ledger.groups.dropped + Counter({"skipped": skipped})
    open_now = Counter(work.role for group in ledger.groups.kept.values() for work in group.open())
    lags: Counter[int] = Counter()
    for trained in training.surviving.values():
        lags.update(trained.lags)
    return Findings(
        violations=violations,
        prompts=ledger.groups.prompts,
        issued=ledger.groups.issued,
        trained=taken - skipped,
        packed=sum(ended.values()) - taken,
        evaluated=ledger.groups.evaluated,
        open={role: open_now[role] for role in _ROLES if role in open_now},
        dropped=dict(sorted(dropped.items())),
        batches=len(ledger.batches),
        trained_batches=len(training.surviving),
        lineage=training.lineage,
        tokens_by_lag=dict(sorted(lags.items())),
        versions=len(training.published),
        payloads=ledger.groups.results,
        unreadable=ledger.unreadable,
        purged=ledger.purged,
        changed_inputs=ledger.opening.changed_inputs,
    )


def _left_out(ledger: Ledger) -> Iterator[Violation]:
    """Prompts are issued in their order, each with all its members: none is left out before the newest."""
    config = ledger.opening.config
    first_task = config.start.prompt if config is not None else 0
    for letter, first in ((WARMUP, 0), (LIVE, 0), (EVALUATION, 0), (TASK, first_task)):
        for number in ledger.groups.closed.missing(letter, first, ledger.groups.newest_issued.get(letter, first)):
            name = prompt_name(letter, number)
            group = ledger.groups.kept.get(name)
            members = sum(not key.attempt for key in group.issues) if group is not None else 0
            if group is None or members != (group.size or 1):
                found = f"{members} members issued, and prompts after it"
                yield Violation("left out", name, found, "all members of every prompt before the newest")


def _steps(ledger: Ledger) -> Iterator[Violation]:
    """Training begins with the first batch, takes packed batches, and names the messages of its batches."""
    training, first_step = ledger.training, ledger.opening.first_step
    trained = min((step for _, step in training.trained), default=None)
    for log, first in (("packed", min(ledger.batches, default=None)), ("trained", trained)):
        if first is not None and first_step is not None and first != first_step:
            found, expected = f"the first batch {log}", f"batch {first_step} before it"
            yield Violation("step out of order", f"batch {first}", found, expected)
    for batch in ledger.batches.values():
        groups = ledger.opening.settings_at(batch.time_ns).buffer.batch_groups
        yield from batch.own_violations(ledger.opening.config, groups=groups, one_lineage=not training.lineage)
    for place, step in training.trained.items():
        yield from _before_its_batch(ledger, step, training.trained_ns[place], "trained")
        if (found_batch := ledger.batches.get(step.step)) is not None:
            yield from found_batch.violations(step, found_batch.purged(ledger.opening, training.trained_ns[place]))
        else:
            yield from _wrong_batch(ledger, step, f"trained on lineage {step.lineage}")
    for saved, saved_ns in training.checkpoints:
        yield from _before_its_batch(ledger, saved, saved_ns, "in a checkpoint")
        if saved.batch_sequence or saved.step != (first_step or 1) - 1:
            yield from _wrong_batch(ledger, saved, f"in a checkpoint of lineage {saved.lineage}")


def _wrong_batch(ledger: Ledger, message: BatchTrained | CheckpointSaved, where: str) -> Iterator[Violation]:
    packed = ledger.batches.get(message.step)
    if packed is None or packed.sequence != message.batch_sequence:
        found = f"{where} from message {message.batch_sequence}"
        expected = f"message {packed.sequence}" if packed is not None else "a batch of this step in the batch log"
        yield Violation("wrong batch", f"batch {message.step}", found, expected)


def _before_its_batch(
    ledger: Ledger, message: BatchTrained | CheckpointSaved, time_ns: int, what: str
) -> Iterator[Violation]:
    packed = ledger.batches.get(message.step)
    if packed is not None and time_ns < packed.time_ns:
        found = f"{what} {(packed.time_ns - time_ns) / 1e9:,.3f} s before it was packed"
        yield Violation("step out of order", packed.name, found, "a batch that is packed first")


def _versions(ledger: Ledger) -> Iterator[Violation]:
    """Every graded token was sampled by a version that was published, and a step that trains gives other weights."""
    config = ledger.opening.config
    for name, before, version, lineage in ledger.training.repeated:
        steps = [step for step in range(before + 1, version + 1) if not ledger.training.skips(lineage, step)]
        batches = [ledger.batches[step] for step in steps if step in ledger.batches]
        trained = any(batch.moves_policy for batch in batches)
        if trained and config and trainer_kind(config.learner.trainer).can(TrainerCapability.MODEL):
            yield Violation("repeated version", name, f"the digest of version {before}", "weights.unchanged before it")
    versions = {version for _, version in ledger.training.published} | ledger.later_versions | {-1}
    versions |= {0} if config is not None and not config.trains else set()
    for version, (key, tokens) in ledger.groups.sampled.items():
        if version not in versions:
            found = f"{tokens} tokens of version {version}"
            yield Violation("unpublished version", str(key), found, f"one of the {len(versions) - 1} published")


def _missing_results(ledger: Ledger) -> Iterator[Violation]:
    """Tokens that are gone are needed no more: they were dropped, or the kept checkpoints contain them."""
    contained = _contained_step(ledger)
    for sequence, needed in ledger.groups.needed.items():
        below = max(ledger.trimmed, ledger.ended.get(needed.name, 0))
        trimmed = ledger.first_result <= sequence < below  # since; the reason may not have been read
        if not trimmed and (needed.step is None or contained is None or needed.step > contained):
            yield needed.violation


def _contained_step(ledger: Ledger) -> int | None:
    """Tokens of the batches up to this step may be gone; None where all must be there.

    All kept checkpoints contain them, or one does that contained every batch there was for a while: in a full stream
    that one alone counts, for no other would come.
    """
    if ledger.opening.keeps_tokens:
        return None
    steps = [] if ledger.training.contained is None else [ledger.training.contained]
    for saved, saved_ns in ledger.training.checkpoints:
        following = ledger.batches.get(saved.step + 1)
        if following is None or following.time_ns > saved_ns:
            steps.append(saved.step)
    return max(steps, default=None)
