"""Drops and their causes: what ends without training has failed, is too old or too late, or teaches nothing."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.algorithms.filters import FILTERS
from asyncrl.algorithms.lag import fresh_share
from asyncrl.config.settings import Config
from asyncrl.state.audit.group import Drop, Group, Key, end_text
from asyncrl.state.audit.violations import Violation
from topics.trajectories import TrajectoryGraded

_SKEW_S = 2.0  # between the clocks that a deadline is measured with
_BEHIND_S = 30.0  # that the buffer may be behind the grades


def drop_violations(group: Group, config: Config) -> Iterator[Violation]:
    """Members and groups that were dropped for a reason that the logs do not bear out."""
    for key, drop in group.drops.items():
        if key in group.issues and (expected := _missing_cause(group, key, drop, config)):
            yield Violation("dropped without cause", str(key), end_text(drop.reason), expected)
    if group.dropped is not None and group.issues and (expected := _missing_group_cause(group, group.dropped, config)):
        found = f"{end_text(group.dropped.reason)} as a group"
        yield Violation("dropped without cause", group.prompt_id, found, expected)


def _missing_cause(group: Group, key: Key, drop: Drop, config: Config) -> str:
    """Return the missing cause of a member's drop; "" where there is one."""
    first = group.claims[key][0] if key in group.claims else None
    if drop.reason == "deadline":
        known = first is not None and first.time_ns < _seen_ns(drop)
        return "no grade or failure before its deadline" if known else _before_deadline(group, drop, config)
    if drop.reason == "lag":
        return "" if first is not None and first.grade and _is_old(first.grade, drop, config) else _OLD
    if first is None or first.grade is not None or first.reason != drop.reason:
        return f"a failure ({drop.reason}) before any grade"
    return ""


def _missing_group_cause(group: Group, drop: Drop, config: Config) -> str:
    """As `_missing_cause`, for a group as a whole."""
    live, least = group.live(), min(2, group.size)
    if drop.reason == "deadline":
        known = len(group.live(_seen_ns(drop))) >= least
        return f"fewer than {least} graded members at its deadline" if known else _before_deadline(group, drop, config)
    if drop.reason == "failed":
        return f"fewer than {least} members that are graded, found {len(live)}" if len(live) >= least else ""
    if drop.reason == "lag":
        fresh = [grade for grade in live.values() if not _is_old(grade, drop, config)]
        return _OLD if len(fresh) >= least or len(fresh) == len(live) else ""
    if drop.reason not in config.learner.filters:
        return "a reason that is known, or a filter of learner.filters"
    return "" if FILTERS[drop.reason](list(live.values())) else "a group that this filter drops"


_OLD = "tokens that are older than the next batch may hold"


def _is_old(grade: TrajectoryGraded, drop: Drop, config: Config) -> bool:
    """Return whether the batch that was next could not take it."""
    buffer = config.buffer
    least = buffer.min_fresh if buffer.stale == "mask" else 1.0
    return fresh_share(grade.versions, min_version=drop.step - 1 - buffer.max_lag) < least


def _seen_ns(drop: Drop) -> float:
    """Server's clock before which the buffer must have seen all grades."""
    return drop.time_ns - _BEHIND_S * 1e9


def _before_deadline(group: Group, drop: Drop, config: Config) -> str:
    early_s = config.buffer.group_deadline_s - (drop.time_ns - group.issued_ns) / 1e9
    return f"its deadline, {early_s:,.1f} s later" if early_s > _SKEW_S else ""
