"""A simulation of the whole loop: an engine whose rate follows its load, a learner, updates, and the waits for both."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.algorithms.lag import open_groups
from asyncrl.engine.scripted.load_client import Lengths
from asyncrl.engine.scripted.rate_curve import RateCurve

_LONGEST_S = 0.25  # of a step of the simulation: the rate changes with the cached tokens


class LoopRules(NamedTuple):
    """The settings and speeds that determine a loop."""

    slots: int  # concurrent trajectories
    batch_groups: int
    group_size: int
    max_lag: int
    lengths: Lengths
    most: int  # tokens of an answer
    curve: RateCurve
    train_tokens_per_s: float  # of the learner
    step_s: float = 0.0  # seconds of a training step beside those of its tokens
    publish_s: float = 0.0  # from the end of a step until an engine begins its update
    update_s: float = 0.0  # in which an engine samples at `update_rate`
    update_rate: float = 2 / 3
    min_fresh: float = 0.25
    prompt_tokens: int = 0


class LoopFigures(NamedTuple):
    """Figures of a loop after its first steps; shares are between 0 and 1."""

    trained_tokens_per_s: float
    sampled_tokens_per_s: float
    masked_share: float  # of the tokens of ended groups
    dropped_share: float
    slots_busy: float
    learner_busy: float
    version_wait: float  # share of the slots that wait for a version
    updating: float  # share of the time

    @property
    def wasted_share(self) -> float:
        """Share of the sampled tokens that were not trained."""
        return self.masked_share + self.dropped_share


def simulate_loop(rules: LoopRules, *, steps: int, warm: int = 10, seed: int = 1) -> LoopFigures:
    """Simulate a loop for some training steps.

    A group waits in its slots for the least version that the prompter gives it. Requests share the rate of the engine
    equally. Batches take the groups that completed first, and at most one packed batch waits for the learner.

    Args:
        rules: the loop.
        steps: training steps, with those that warm the loop up.
        warm: steps before the figures count.
        seed: of the lengths.
    """
    loop = _Loop(rules, random.Random(seed), warm)
    loop.settle()
    while loop.trained < steps:
        loop.advance()
        loop.settle()
    return loop.figures()


class _Member(NamedTuple):
    group: int
    begin: float  # tokens that each request had got when it began
    tokens: int


@dataclass
class _Loop:
    rules: LoopRules
    draws: random.Random
    warm: int
    now: float = 0.0
    share: float = 0.0  # tokens that a request has got that runs since the begin
    issued: int = 0
    open: int = 0
    packed: int = 0
    trained: int = 0
    version: int = 0  # of the engine
    publications: deque[tuple[float, int]] = field(default_factory=deque)
    version_begins: list[float] = field(default_factory=lambda: [0.0])  # `share` at the begin of each version
    updating_until: float = 0.0
    training_until: float | None = None
    batches: deque[tuple[int, int]] = field(default_factory=deque)  # tokens of packed batches, and those not masked
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # groups and least versions of issued members
    held: deque[tuple[int, int]] = field(default_factory=deque)  # those of them that wait in a slot for a version
    running: list[tuple[float, int, _Member]] = field(default_factory=list)  # by the `share` at their end
    begins: float = 0.0  # sum of `begin` of the running members
    unfinished: dict[int, int] = field(default_factory=dict)
    members: dict[int, list[_Member]] = field(default_factory=dict)
    ready: deque[int] = field(default_factory=deque)
    sums: dict[str, float] = field(default_factory=dict)
    began: float = 0.0

    def advance(self) -> None:
        """Advance to the next event, or by the longest step."""
        rules, running = self.rules, len(self.running)
        rate = rules.curve.tokens_per_s(running, running * (self.share + rules.prompt_tokens) - self.begins)
        updating = self.now < self.updating_until
        each = rate / running * (rules.update_rate if updating else 1.0) if running else 0.0
        ends = [self.now + _LONGEST_S]
        ends += [self.now + (self.running[0][0] - self.share) / each] if each else []
        ends += [self.training_until] if self.training_until is not None else []
        ends += [self.publications[0][0]] if self.publications and not updating else []  # a later version waits
        ends += [self.updating_until] if updating else []
        seconds = max(0.0, min(ends) - self.now)
        self.now += seconds
        self.share += each * seconds
        self._count("sampled", each * seconds * running)
        self._count("slots", seconds * running)
        self._count("held", seconds * len(self.held))
        self._count("learner", seconds * (self.training_until is not None))
        self._count("updating", seconds * updating)

    def settle(self) -> None:
        """Do everything that is due now."""
        while self.running and self.running[0][0] <= self.share + 1e-9:
            self._end(heapq.heappop(self.running)[2])
        if self.training_until is not None and self.training_until <= self.now + 1e-9:
            self._trained()
        if self.publications and self.publications[0][0] <= self.now + 1e-9 and self.now >= self.updating_until:
            self._update()
        while self._pack():
            pass
        if self.training_until is None and self.batches:
            tokens, _ = self.batches[0]
            self.training_until = self.now + self.rules.step_s + tokens / self.rules.train_tokens_per_s
        self._issue()
        self._begin()

    def figures(self) -> LoopFigures:
        """Return the figures of the time after the first steps."""
        seconds, found = self.now - self.began, self.sums.get
        ended = max(1.0, found("trained", 0) + found("masked", 0) + found("dropped", 0))
        return LoopFigures(
            trained_tokens_per_s=found("trained", 0) / seconds,
            sampled_tokens_per_s=found("sampled", 0) / seconds,
            masked_share=found("masked", 0) / ended,
            dropped_share=found("dropped", 0) / ended,
            slots_busy=found("slots", 0) / seconds / self.rules.slots,
            learner_busy=found("learner", 0) / seconds,
            version_wait=found("held", 0) / seconds / self.rules.slots,
            updating=found("updating", 0) / seconds,
        )

    def _count(self, name: str, amount: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + amount

    def _issue(self) -> None:
        rules = self.rules
        while self.open < open_groups(rules.batch_groups, rules.max_lag):
            ahead = self.open - (self.packed - self.trained) * rules.batch_groups
            batch = self.packed + 1 + ahead // rules.batch_groups
            oldest = self.packed - rules.max_lag
            least = max(0, oldest, min(batch - 1 - rules.max_lag, self.trained))
            self.waiting.extend([(self.issued, least)] * rules.group_size)
            self.unfinished[self.issued], self.members[self.issued] = rules.group_size, []
            self.issued, self.open = self.issued + 1, self.open + 1

    def _begin(self) -> None:
        while self.held and self.held[0][1] <= self.version:
            self._start(self.held.popleft()[0])
        while self.waiting and len(self.running) + len(self.held) < self.rules.slots:
            group, least = self.waiting.popleft()
            if least <= self.version:
                self._start(group)
            else:
                self.held.append((group, least))

    def _start(self, group: int) -> None:
        member = _Member(group, self.share, self.rules.lengths.draw(self.draws, self.rules.most))
        self.begins += self.share
        heapq.heappush(self.running, (self.share + member.tokens, self.issued * 1000 + len(self.running), member))

    def _end(self, member: _Member) -> None:
        self.begins -= member.begin
        self.members[member.group].append(member)
        self.unfinished[member.group] -= 1
        if not self.unfinished[member.group]:
            self.ready.append(member.group)

    def _old(self, member: _Member, least: int) -> float:
        """Return the tokens of a member that are older than a version."""
        if least >= len(self.version_begins):
            return float(member.tokens)
        return min(float(member.tokens), max(0.0, self.version_begins[max(0, least)] - member.begin))

    def _pack(self) -> bool:
        rules, step = self.rules, self.packed + 1
        if self.packed - self.trained > min(1, rules.max_lag) or len(self.ready) < rules.batch_groups:
            return False
        least, chosen = step - 1 - rules.max_lag, []
        for group in list(self.ready):
            kept = [one for one in self.members[group] if 1 - self._old(one, least) / one.tokens >= rules.min_fresh]
            self._count("dropped", sum(one.tokens for one in self.members[group]) - sum(one.tokens for one in kept))
            self.members[group] = kept
            if len(kept) < min(2, rules.group_size):
                self._count("dropped", sum(one.tokens for one in kept))
                self.ready.remove(group)
                self.open -= 1
            else:
                chosen.append(group)
            if len(chosen) == rules.batch_groups:
                break
        if len(chosen) < rules.batch_groups:
            return False
        members = [one for group in chosen for one in self.members.pop(group)]
        for group in chosen:
            self.ready.remove(group)
        tokens = sum(one.tokens for one in members)
        self.batches.append((tokens, tokens - round(sum(self._old(one, least) for one in members))))
        self.packed = step
        return True

    def _trained(self) -> None:
        tokens, fresh = self.batches.popleft()
        self._count("trained", fresh)
        self._count("masked", tokens - fresh)
        self.training_until = None
        self.trained += 1
        self.open -= self.rules.batch_groups
        self.publications.append((self.now + self.rules.publish_s, self.trained))
        if self.trained == self.warm:
            self.sums, self.began = {}, self.now

    def _update(self) -> None:
        """Load the newest version that waits."""
        while self.publications and self.publications[0][0] <= self.now + 1e-9:
            _, self.version = self.publications.popleft()
        self.version_begins += [self.share] * (self.version + 1 - len(self.version_begins))
        self.updating_until = self.now + self.rules.update_s
