"""The roles of a run, one row each: process, work queue, count, scaling, stop order and permissions follow from it.

The module of a role is `actors/ROLE/actor.py`. What it publishes and subscribes to stands in the rows of the topics.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Role(NamedTuple):
    """A kind of actor."""

    name: str
    kind: Literal["worker", "keeper", "service"]  # stateless pool; single writer of a log; anything else
    stops: int  # phase in which the supervisor asks it to leave: roles that make work for others first
    setting: str = ""  # holds its number of processes at the start; "": one, and for keepers their spares
    queue: str = ""  # topic whose messages its processes share
    scalable: bool = False  # by `asyncrl scale`
    slow: bool = False  # to start, so it is started before the others
    children: bool = False  # its work runs in processes that are not actors


SUPERVISOR = "supervisor"

ROLES = (
    Role("prompter", "keeper", stops=1, children=True),
    Role("rollout", "worker", stops=2, setting="rollout.workers", queue="prompt.issued", scalable=True),
    Role(
        "reward",
        "worker",
        stops=3,
        setting="reward.workers",
        queue="trajectory.generated",
        scalable=True,
        children=True,
    ),
    Role("buffer", "keeper", stops=4),
    Role("learner", "keeper", stops=4, slow=True),
    Role("engine", "service", stops=4, setting="engine.count", scalable=True, slow=True, children=True),
    Role("evaluator", "worker", stops=2, setting="eval.workers", queue="eval.requested", scalable=True, children=True),
    Role("recorder", "service", stops=5),
    Role(SUPERVISOR, "keeper", stops=6),  # it stops the others, and then itself
)
ROLE_NAMES = tuple(role.name for role in ROLES)
KEEPERS = tuple(role.name for role in ROLES if role.kind == "keeper")
WORKERS = tuple(role.name for role in ROLES if role.kind == "worker")
SCALABLE = tuple(role.name for role in ROLES if role.scalable)
