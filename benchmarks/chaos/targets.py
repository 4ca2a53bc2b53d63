"""Targets of a campaign: signals, crash points and `asyncrl up` itself."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from asyncrl.config.settings import Config
from asyncrl.crash import POINTS
from asyncrl.run.fault_injection import Target, signal_targets

AT_THE_END = ("learner.exported",)  # points that a run passes only when it finishes


def all_targets(config: Config | None = None) -> list[Target]:
    """Return every fault that a run of a config can get; without a config, of a run with all defaults.

    `asyncrl up` has no supervisor: a campaign kills and resumes it, but never freezes it.
    """
    config = config or Config()
    there = {"groupreward": config.group_workers, "sessions": config.session_keepers, "judge": config.judges}
    absent = [role for role, count in there.items() if not count]  # a draw of these roles is lost
    passed = [point for point in POINTS if not point.startswith("card.") or config.placement.colocate == "time_slice"]
    points = [Target(role, point) for point in passed for role in POINTS[point] if role not in absent]
    return [*signal_targets(), Target("up", "kill"), Target("up", "wake"), *points]


def each_point(targets: Sequence[Target], times: int, seed: int) -> Iterator[Target]:
    """Yield every crash point this many times, in the order that a seed draws; its roles take turns."""
    dice = random.Random(seed)
    points = {target.kind for target in targets if target.family == "crash"}
    roles = {point: [target for target in targets if target.kind == point] for point in sorted(points)}
    for turn in range(times):
        for point in dice.sample(list(roles), len(roles)):
            yield roles[point][turn % len(roles[point])]
