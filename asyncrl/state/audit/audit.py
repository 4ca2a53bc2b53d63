"""The audit's verdict: every trajectory has one end, every batch was trained once, every version is true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from asyncrl.state.audit.ledger import Ledger
from asyncrl.state.audit.open_work import Queue, open_violations
from asyncrl.state.audit.violations import Violation
from topics.batches import BatchTrained
from topics.weights import CheckpointSaved

_ROLES = ("rollout", "reward", "buffer")  # holders of open work


class Findings(NamedTuple):
    """The findings of an audit."""

    violations: list[Violation]
    prompts: int
    issued: int  # attempts at trajectories
    trained: int
    packed: int  # in a batch that is not trained yet
    evaluated: int  # held-out prompts that the score of an evaluation holds
    dropped: dict[str, int]  # by reason, alone, with their group or with a batch that was skipped
    open: dict[str, int]  # issued and without an end, by the role whose turn it is
    batches: int
    trained_batches: int
    lineage: int  # newest lineage
    tokens_by_lag: dict[int, int]  # trained; -1 for supervised tokens
    versions: int  # published
    payloads: int  # results still stored
    unreadable: int  # messages; each is a dead letter too


def audit(ledger: Ledger, queues: Mapping[str, Queue]) -> Findings:
    """Compare the logs with each other, once all of them were read.

    Args:
        ledger: of a run that goes on, no log was read further than those that hold the causes of what is on it.
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
    )


def _left_out(ledger: Ledger) -> Iterator[Violation]:
    """Prompts are issued in their order, each with all its members: none is left out before the newest."""
    config = ledger.opening.config
    for letter, first in (("w", 0), ("p", config.start.prompt if config is not None else 0)):
        for number in ledger.groups.folded.missing(letter, first, ledger.groups.newest_issued.get(letter, first)):
            name = f"{letter}{number:06d}"
            group = ledger.groups.kept.get(name)
            members = sum(not key.attempt for key in group.issues) if group is not None else 0
            if group is None or members != (group.size or 1):
                found = f"{members} members issued, and prompts after it"
                yield Violation("left out", name, found, "all members of every prompt before the newest")


def _steps(ledger: Ledger) -> Iterator[Violation]:
    """Training begins with the first batch, takes what was packed, and names the messages that hold its batches."""
    training, first_step = ledger.training, ledger.opening.first_step
    trained = min((step for _, step in training.trained), default=None)
    for log, first in (("packed", min(ledger.batches, default=None)), ("trained", trained)):
        if first is not None and first_step is not None and first != first_step:
            found, expected = f"the first batch {log}", f"batch {first_step} before it"
            yield Violation("step out of order", f"batch {first}", found, expected)
    for batch in ledger.batches.values():
        yield from batch.own_violations(ledger.opening.config, one_lineage=not training.lineage)
    for step in training.trained.values():
        if (found_batch := ledger.batches.get(step.step)) is not None:
            yield from found_batch.violations(step)
        else:
            yield from _wrong_batch(ledger, step, f"trained on lineage {step.lineage}")
    for saved, _ in training.checkpoints:
        if saved.batch_sequence or saved.step != (first_step or 1) - 1:
            yield from _wrong_batch(ledger, saved, f"in a checkpoint of lineage {saved.lineage}")


def _wrong_batch(ledger: Ledger, message: BatchTrained | CheckpointSaved, where: str) -> Iterator[Violation]:
    packed = ledger.batches.get(message.step)
    if packed is None or packed.sequence != message.batch_sequence:
        found = f"{where} from message {message.batch_sequence}"
        expected = f"message {packed.sequence}" if packed is not None else "a batch of this step in the batch log"
        yield Violation("wrong batch", f"batch {message.step}", found, expected)


def _versions(ledger: Ledger) -> Iterator[Violation]:
    """Every graded token was sampled by a version that was published."""
    versions = {version for _, version in ledger.training.published} | ledger.later_versions | {-1}
    for version, (key, tokens) in ledger.groups.sampled.items():
        if version not in versions:
            found = f"{tokens} tokens of version {version}"
            yield Violation("unpublished version", str(key), found, f"one of the {len(versions) - 1} published")


def _missing_results(ledger: Ledger) -> Iterator[Violation]:
    """Tokens that are gone are needed no more: they were dropped, or the kept checkpoints contain them."""
    contained = _contained_step(ledger)
    for sequence, needed in ledger.groups.needed.items():
        trimmed = ledger.first_result <= sequence < ledger.trimmed  # since; the reason may not have been read
        if not trimmed and (needed.step is None or contained is None or needed.step > contained):
            yield needed.violation


def _contained_step(ledger: Ledger) -> int | None:
    """Tokens of the batches up to this step may be gone; None where all must be there.

    All kept checkpoints contain them, or one does that contained every batch there was for a while: in a full stream
    that one alone counts, for no other would come.
    """
    steps = [] if ledger.training.contained is None else [ledger.training.contained]
    for saved, saved_ns in ledger.training.checkpoints:
        following = ledger.batches.get(saved.step + 1)
        if following is None or following.time_ns > saved_ns:
            steps.append(saved.step)
    return max(steps, default=None)
