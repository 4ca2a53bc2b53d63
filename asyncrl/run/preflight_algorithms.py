"""Pre-flight check of the user's own losses, advantages and filters: the contract of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.filters import FILTERS
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.own_columns import COLUMNS
from asyncrl.config.check import Finding
from asyncrl.config.own_algorithms import Named, named_algorithms
from asyncrl.config.settings import Config
from asyncrl.config.staged import as_in
from topics.batches import BatchMember
from topics.trajectories import Reference

_REWARDS = ([0.0, 1.0], [1.0], [0.5] * 4, [0.0, 0.25, 1.0], [-0.5, 2.0])  # shaped ones leave [0, 1]


def check_algorithms(config: Config, _base: Path) -> Iterator[Finding]:
    """Run the contract of `asyncrl/algorithms/contract.py` on each algorithm that is the user's own."""
    own = {(one.key, one.name): one for one in named_algorithms(config) if ":" in one.name}
    for one in own.values():
        if problem := _problem(config, one):
            yield Finding((one.key,), f"{one.name}: {problem}")


def _problem(config: Config, one: Named) -> str:
    # It loads torch, which takes a second that configs without algorithms of the user's own do not spend.
    from asyncrl.algorithms.contract import advantage_problem, column_problem, filter_problem, loss_problem

    if one.table is LOSSES:
        return loss_problem(msgspec.convert(as_in(config, one.stage).learner.loss_options, LOSSES[one.name]))
    if one.table is COLUMNS:
        return column_problem(COLUMNS[one.name])
    if one.table is FILTERS:
        return filter_problem(FILTERS[one.name](), [_members(rewards) for rewards in _REWARDS])
    return advantage_problem(ADVANTAGES[one.name])


def _members(rewards: list[float]) -> list[BatchMember]:
    return [BatchMember(f"p000000-{i}", 0, Reference(1, "", 1), reward, 5) for i, reward in enumerate(rewards)]
