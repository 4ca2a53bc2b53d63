"""Targets of a campaign: besides signals, crash points and `asyncrl up` itself."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from asyncrl.config.settings import Config
from asyncrl.crash import POINTS
from asyncrl.run.fault_injection import Target, signal_targets

AT_THE_END = ("learner.exported",)  # points that a run passes only when it finishes


def all_targets(config: Config | None = None) -> list[Target]:
    """Everything that can be done to anybody in a run of a config, of one with all defaults unless it is given.

    `asyncrl up` has no supervisor, so it is killed and resumed, never left frozen.
    """
    config = config or Config()
    there = {"groupreward": config.group_workers, "sessions": config.session_keepers, "judge": config.judges}
    absent = [role for role, count in there.items() if not count]  # what is drawn for those is lost
    passed = [point for point in POINTS if not point.startswith("card.") or config.placement.colocate == "time_slice"]
    points = [Target(role, point) for point in passed for role in POINTS[point] if role not in absent]
    return [*signal_targets(), Target("up", "kill"), Target("up", "wake"), *points]


def each_point(targets: Sequence[Target], times: int, seed: int) -> Iterator[Target]:
    """Every crash point so often, in the order a seed draws, the roles that pass it taking turns."""
    dice = random.Random(seed)
    points = {target.kind for target in targets if target.family == "crash"}
    roles = {point: [target for target in targets if target.kind == point] for point in sorted(points)}
    for turn in range(times):
        for point in dice.sample(list(roles), len(roles)):
            yield roles[point][turn % len(roles[point])]
