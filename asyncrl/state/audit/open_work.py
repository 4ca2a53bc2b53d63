"""Open work: every trajectory without an end must be pending in a queue or in the buffer, and within its time."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from asyncrl.state.audit.comparison import deadline_s
from asyncrl.state.audit.group import Group, Work
from asyncrl.state.audit.ledger import Ledger
from asyncrl.state.audit.violations import Violation
from topics.topic import BATCHES

_LATE_S = 30.0  # for the buffer to act on a deadline


class Queue(NamedTuple):
    """A work queue before the logs were read. It names what it holds by number only."""

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
    for group in ledger.groups.kept.values():
        lost: list[Violation] = []
        for work in group.open():
            if work.queue in queues:
                lost += _lost(ledger, queues[work.queue], work)
                counts[work.queue, _place(queues[work.queue], work.sequence)] += 1
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
    if group.end is not None or not group.issues:
        return
    complete_ns = group.complete_ns()
    if group.stage == "eval" and (complete_ns is not None or not group.issued):
        return  # its score follows, or its other members
    if is_finished(ledger) and group.stage != "eval":
        state = "complete" if complete_ns is not None else "incomplete"
        found = f"{state} and without an end, and all steps are trained"
        yield Violation("left over", group.prompt_id, found, "a batch, or an end of its own")
    elif group.stage == "warmup":
        if group.number < ledger.groups.newest_warmup:
            found = f"without an end, and prompt {ledger.groups.newest_warmup} of the warm-up is in a batch"
            yield Violation("left over", group.prompt_id, found, "batches of the warm-up in the order of the data")
    elif complete_ns is not None:
        yield from _passed_over(ledger, group, complete_ns)
    elif ledger.opening.config is not None:
        begun_ns = max(group.issued_ns, ledger.opening.opened_ns)
        late_s = (ledger.buffer_ns - begun_ns) / 1e9 - deadline_s(ledger.opening.config, group)
        if late_s > _LATE_S:
            found = f"open, and the buffer was there {late_s:,.0f} s after its deadline"
            yield Violation("overdue", group.prompt_id, found, "an end at its deadline")


def _passed_over(ledger: Ledger, group: Group, complete_ns: int) -> Iterator[Violation]:
    """A complete group waits behind those that were open with it, and no longer.

    Admission lets (max_lag + 1) batches of groups be open, so one of as many batches takes it; one more for groups that
    a buffer which starts anew completes in another order, which is why only batches of the newest one count.
    """
    if ledger.opening.config is None:
        return
    max_lag = ledger.opening.config.buffer.max_lag
    since_ns = max(complete_ns, ledger.writers.claimed_ns.get(BATCHES.name, 0))
    passed = len(ledger.packed_ns) - bisect_right(ledger.packed_ns, since_ns)
    if passed > max_lag + 1:
        found = f"complete and without an end, and {passed} batches were packed without it"
        yield Violation("left over", group.prompt_id, found, f"one of the first {max_lag + 1}")
