"""The roles of a run, one row each: process, work queue, count, scaling, stop order and permissions follow from it.

The rows of the topics have its publications and subscriptions. `topics.table.Tables` adds the roles of a user's actors.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Role(NamedTuple):
    """A kind of actor."""

    name: str
    kind: Literal["worker", "keeper", "service"]  # stateless pool; single writer of a log; anything else
    stops: int  # phase in which the supervisor asks it to leave: roles that make work for others first
    setting: str = ""  # its number of processes at the start; "": `processes`, and for keepers one and their spares
    queue: str = ""  # topic whose messages its processes share
    scalable: bool = False  # by `asyncrl scale`
    slow: bool = False  # to start, so it is started before the others
    children: bool = False  # its work runs in processes that are not actors
    processes: int = 1  # at the start, unless a setting says otherwise
    subscribes: tuple[str, ...] = ()  # names of further topics whose rows do not name this role
    folder: str = ""  # below `actors`, if it differs from the role

    @property
    def module(self) -> str:
        """The module with its `main`; that of a user's actor is theirs."""
        return f"actors.{self.folder or self.name}.actor"


class WorkerPool(NamedTuple):
    """Processes of a role that alone do the work on some tasks."""

    role: str
    name: str
    tasks: tuple[str, ...]

    @property
    def pool(self) -> str:
        """The name that its processes are counted under: `rollout-code`."""
        return f"{self.role}-{self.name}"


SUPERVISOR = "supervisor"
OPERATOR = "operator"  # no actor: provisions the run and asks things of it
MONITOR = "monitor"  # no actor: reads everything, with any NATS client, and publishes nothing
OBSERVER = "observer"  # no actor: reads states, metrics and ids, but no texts and no tokens, and publishes nothing

ROLES = (
    Role("prompter", "keeper", 1, children=True),
    Role("rollout", "worker", 2, "rollout.workers", "prompt.issued", scalable=True),
    Role("reward", "worker", 3, "reward.workers", "trajectory.generated", scalable=True, children=True),
    Role("groupreward", "worker", 3, "group_workers", "group.completed", scalable=True, children=True, folder="reward"),
    Role("judge", "worker", 3, "judges", "turn.ready", scalable=True, children=True),
    Role("buffer", "keeper", 4),
    Role("learner", "keeper", 4, slow=True, children=True),
    Role("engine", "service", 4, "engine.count", scalable=True, slow=True, children=True),
    Role("router", "service", 4, "engine.router.count", children=True),
    Role("gateway", "service", 1, "gateway.count"),
    Role("sessions", "keeper", 2, "session_keepers"),
    Role("recorder", "service", 5),
    Role(SUPERVISOR, "keeper", 6),  # it stops the others, and then itself
)
ROLE_NAMES = tuple(role.name for role in ROLES)
KEEPERS = tuple(role.name for role in ROLES if role.kind == "keeper")
WORKERS = tuple(role.name for role in ROLES if role.kind == "worker")
OWN = {role.name: role for role in ROLES}


def pool_of(actor_id: str) -> str:
    """The processes that an actor is counted with: `engine-large` of `engine-large-2`, `rollout` of `rollout-2`."""
    return actor_id.rpartition("-")[0]


def number_in_pool(actor_id: str) -> int:
    """Return the number of an actor in its pool, from 1: 2 of `engine-large-2`."""
    return int(actor_id.rpartition("-")[2])


def pool_named(text: str) -> str:
    """The pool that a user names as the config does: `rollout-code` of `rollout.code`, and of itself."""
    return text.replace(".", "-")


def role_of(name: str) -> str:
    """The role of an actor or of a pool of them: `engine` of `engine-2`, `engine-large-2` and `engine-large`."""
    return name.partition("-")[0]
