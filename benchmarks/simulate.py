"""The ideal schedule: the times that admission, packing, lag and training allow if nothing else takes time."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Rules(NamedTuple):
    """The settings that determine a schedule; groups have one trajectory."""

    slots: int  # W: concurrent trajectories
    batch_groups: int  # B
    max_lag: int  # L
    ahead: int  # packed batches that wait while one is trained
    steps: int
    step_s: float  # seconds of one training step
    min_fresh: float = 0.25
    tokens: int = 16  # of each trajectory


class Schedule(NamedTuple):
    """The times of all events, in seconds from the issue of the first prompt."""

    trained_s: list[float]  # end of each step, from step 1
    issued: int
    dropped: int  # trajectories dropped for lag


class _Trajectory(NamedTuple):
    number: int
    start: float
    duration: float
    version: int  # of the weights at its begin


def ideal_schedule(duration: Callable[[int], float], rules: Rules) -> Schedule:
    """Simulate a run event by event without any overhead.

    The rules: prompts are issued in order while open groups <= (L+1) * B and the run still needs them. Slots take
    prompts in that order. A batch takes the groups that completed first; at most `ahead` batches wait for training.
    When a batch would take a trajectory whose share of tokens within the lag bound is below `min_fresh`, the trajectory
    is dropped.

    Args:
        duration: seconds of each prompt's generation, by its number from 0.
        rules: the settings.
    """
    run = _Run(duration, rules)
    run.settle()
    while run.trained < rules.steps:
        run.advance()
    return Schedule(run.trained_s, run.issued, run.dropped)


def lower_bound_s(duration: Callable[[int], float], rules: Rules) -> float:
    """Return a lower bound in seconds of every schedule of these slots and this trainer.

    The bound is the greater of two times: all work shared by all slots; the first batch's earliest end plus all later
    steps.
    """
    durations = [duration(number) for number in range(rules.steps * rules.batch_groups)]
    free = [0.0] * rules.slots
    ends = []
    for seconds in durations:
        ends.append(heapq.heappop(free) + seconds)
        heapq.heappush(free, ends[-1])
    first_batch = sorted(ends)[rules.batch_groups - 1]
    return max(sum(durations) / rules.slots, first_batch + rules.steps * rules.step_s)


@dataclass
class _Run:
    duration: Callable[[int], float]
    rules: Rules
    now: float = 0.0
    issued: int = 0
    open: int = 0
    packed: int = 0
    dropped: int = 0
    training: bool = False
    trained_s: list[float] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)  # issued, no slot yet
    ready: deque[_Trajectory] = field(default_factory=deque)  # completed, the oldest first
    running: int = 0
    events: list[tuple[float, int, _Trajectory | None]] = field(default_factory=list)  # None: a step is trained

    @property
    def trained(self) -> int:
        return len(self.trained_s)

    def advance(self) -> None:
        """Advance to the next time at which an event ends."""
        self.now = self.events[0][0]
        while self.events and self.events[0][0] == self.now:
            _, _, ended = heapq.heappop(self.events)
            if ended is not None:
                self.running -= 1
                self.ready.append(ended)
            else:
                self.training = False
                self.trained_s.append(self.now)
                self.open -= self.rules.batch_groups
        self.settle()

    def settle(self) -> None:
        """Do everything that is possible now."""
        while self._pack():
            pass
        if not self.training and self.packed > self.trained:
            self.training = True
            heapq.heappush(self.events, (self.now + self.rules.step_s, -1, None))
        self._issue()
        while self.waiting and self.running < self.rules.slots:
            number = self.waiting.popleft()
            self.running += 1
            began = _Trajectory(number, self.now, self.duration(number), self.trained)
            heapq.heappush(self.events, (self.now + began.duration, number, began))

    def _issue(self) -> None:
        rules = self.rules
        still_needed = (rules.steps - self.trained) * rules.batch_groups
        room = min((rules.max_lag + 1) * rules.batch_groups, still_needed) - self.open
        for _ in range(room):
            self.waiting.append(self.issued)
            self.issued += 1
            self.open += 1

    def _pack(self) -> bool:
        """Take the next batch, or drop trajectories that are too old for it; False if neither is possible."""
        rules, step = self.rules, self.packed + 1
        if step > rules.steps or self.packed - self.trained > rules.ahead or len(self.ready) < rules.batch_groups:
            return False
        min_version = step - 1 - rules.max_lag
        taken: list[_Trajectory] = []
        old: list[_Trajectory] = []
        for one in self.ready:
            (old if self._too_old(one, min_version) else taken).append(one)
            if len(taken) == rules.batch_groups:
                break
        if old:
            self.ready = deque(one for one in self.ready if one not in old)
            self.dropped += len(old)
            self.open -= len(old)
            return True
        if len(taken) < rules.batch_groups:
            return False
        for _ in range(rules.batch_groups):
            self.ready.popleft()
        self.packed = step
        return True

    def _too_old(self, one: _Trajectory, min_version: int) -> bool:
        if min_version <= one.version:
            return False
        # Each token carries the version that was current at its share of the trajectory's time.
        since = self.trained_s[min_version - 1] - one.start
        count = self.rules.tokens
        old = min(count, math.ceil(since / one.duration * count)) if one.duration else count
        return count - old < count * self.rules.min_fresh
