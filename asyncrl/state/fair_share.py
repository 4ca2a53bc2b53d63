"""Whole processes of a pool, divided among runs by weight; the remainder alternates over time. Time is passed in.

Each run has the whole part of its quota always. A process of the remainder moves to the run that is owed most, once
that exceeds the tolerance, so that moves are rare.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from math import floor
from typing import NamedTuple

_TOLERANCE = 0.04  # greatest error of a run's share over any window, as far as moves take no time
_START_S = 300.0  # a start that takes longer counts as work: one run's trouble does not keep it from the others


class Held(NamedTuple):
    """The processes of one run at a moment."""

    ready: int  # those that work
    all: int  # those that are wanted, or still there
    works: bool = True  # there is work for them


class Apportionment:
    """The division of one pool."""

    def __init__(self, weights: Mapping[str, Fraction], count: int, window_s: float) -> None:
        self._weights, self._count = dict(weights), count  # exact, since quotas are rounded down; processes
        self._window_s = window_s  # over which shares shall hold
        self._bound_s = _TOLERANCE * count * window_s  # process-seconds that the poorest may lag the richest
        self._active: tuple[str, ...] = ()
        self._wanted: dict[str, int] = {}
        self._owed_s: dict[str, float] = {}  # process-seconds
        self._idle_s: dict[str, float] = {}  # of processes that had not started yet, since the newest change
        self._looked_s = self._changed_s = 0.0
        self._arrived_s: float | None = None  # when all were ready after the newest change
        self._worked: deque[tuple[float, float, dict[str, int]]] = deque()  # until when, for how long, ready by run

    def decide(self, now_s: float, held: Mapping[str, Held]) -> dict[str, int]:
        """Return the number of processes of each run; empty if nothing has to change because no run has work.

        Args:
            held: by run, of those that are there.
        """
        active = tuple(run for run in self._weights if run in held and held[run].works)
        self._account(now_s, held)
        if not active:
            return {}
        if active != self._active:
            self._deal(now_s, active, held)
        elif self._settled(now_s, held):
            self._move(now_s)
        return dict.fromkeys(held, 0) | self._wanted

    def shares(self) -> dict[str, float]:
        """Return the parts of the work of the last window that each run's processes did; empty before there was any."""
        totals = {run: sum(s * ready.get(run, 0) for _, s, ready in self._worked) for run in self._weights}
        total = sum(totals.values())
        return {run: worked_s / total for run, worked_s in totals.items()} if total else {}

    def due(self, run: str) -> float:
        """Return the share of a run by weight, among those that are there and have work."""
        return float(self._quota(run) / self._count) if run in self._active else 0.0

    def _quota(self, run: str) -> Fraction:
        return self._count * self._weights[run] / sum(self._weights[one] for one in self._active)

    def _account(self, now_s: float, held: Mapping[str, Held]) -> None:
        """Record the work since the last look: the current processes of each run."""
        passed_s = now_s - self._looked_s if self._looked_s else 0.0
        self._looked_s = now_s
        self._worked.append((now_s, passed_s, {run: one.ready for run, one in held.items()}))
        while self._worked[0][0] < now_s - self._window_s:
            self._worked.popleft()
        if not set(self._active) <= held.keys():
            return
        self._charge({run: passed_s * held[run].all for run in self._active})
        for run in self._active:
            self._idle_s[run] += passed_s * (held[run].all - held[run].ready)

    def _charge(self, had_s: Mapping[str, float]) -> None:
        """Take in the process-seconds that each run had, or with other signs did not."""
        most_s = self._count * max(self._window_s, _START_S)  # larger debts are forgotten
        for run, seconds in had_s.items():
            owed_s = self._owed_s[run] + self.due(run) * sum(had_s.values()) - seconds
            self._owed_s[run] = max(-most_s, min(most_s, owed_s))

    def _deal(self, now_s: float, active: tuple[str, ...], held: Mapping[str, Held]) -> None:
        """Divide again: the remainder goes to its current holders, then by the largest remainders."""
        self._active, self._owed_s = active, dict.fromkeys(active, 0.0)
        self._changed(now_s)
        quotas = {run: self._quota(run) for run in active}
        self._wanted = {run: floor(quota) for run, quota in quotas.items()}
        rests = {run: quota - floor(quota) for run, quota in quotas.items() if quota != floor(quota)}
        order = sorted(rests, key=lambda run: (held[run].all > self._wanted[run], rests[run]), reverse=True)
        for run in order[: self._count - sum(self._wanted.values())]:
            self._wanted[run] += 1

    def _changed(self, now_s: float) -> None:
        self._changed_s, self._arrived_s, self._idle_s = now_s, None, dict.fromkeys(self._active, 0.0)

    def _settled(self, now_s: float, held: Mapping[str, Held]) -> bool:
        """Return whether a process may move: the last one that did has worked for as long as its start took."""
        if self._arrived_s is None:
            if any(held[run].ready < count for run, count in self._wanted.items()):
                return now_s - self._changed_s > _START_S
            self._arrived_s = now_s
            if now_s - self._changed_s <= _START_S:
                self._charge({run: -seconds for run, seconds in self._idle_s.items()})
        return now_s - self._arrived_s >= self._arrived_s - self._changed_s

    def _move(self, now_s: float) -> None:
        """Move one of the processes that are left over, where the tolerance asks for it."""
        quotas = {run: self._quota(run) for run in self._active}
        poor = [run for run, quota in quotas.items() if self._wanted[run] < quota]
        rich = [run for run, quota in quotas.items() if self._wanted[run] > quota]
        if not (poor and rich):
            return
        poorest, richest = max(poor, key=self._owed_s.__getitem__), min(rich, key=self._owed_s.__getitem__)
        if self._owed_s[poorest] - self._owed_s[richest] >= self._bound_s:
            self._wanted[poorest] += 1
            self._wanted[richest] -= 1
            self._changed(now_s)


def granted(wanted: Mapping[str, int], had: Mapping[str, int], held: Mapping[str, int], count: int) -> dict[str, int]:
    """Return what each run may be asked to have now: less at once, more only where others have left.

    Args:
        wanted: in the end; together no more than there are.
        had: processes that each run wants now.
        held: those, and others that are still there.
        count: processes of the pool.
    """
    held, found = dict(held), {}
    for run, target in wanted.items():
        room = count - sum(number for other, number in held.items() if other != run)
        found[run] = target if target <= had[run] else max(had[run], min(target, room))
        held[run] = max(held[run], found[run])
    return found
