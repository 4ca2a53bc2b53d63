"""Chaos targets: which fault fits which role, how they are named, and in which order a seed draws them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from asyncrl.crash import POINTS
from asyncrl.errors import AsyncRLError
from topics.roles import ROLE_NAMES

SEVERAL = "several"  # two to four processes in the same instant
SERVER = "engine-server"  # the inference server that an engine actor started
ROLES = (*ROLE_NAMES, SERVER, "nats", "up", SEVERAL)
AT_THE_END = ("learner.exported",)  # points that a run passes only when it finishes


class Target(NamedTuple):
    """A role and what is done to it."""

    role: str
    kind: str  # "kill", "freeze", "wake", or the name of a crash point

    @property
    def family(self) -> str:
        """`kill`, `freeze`, `wake` or `crash`."""
        return "crash" if self.kind in POINTS else self.kind

    def __str__(self) -> str:
        return f"{self.role}{'@' if self.family == 'crash' else ':'}{self.kind}"


class TargetError(AsyncRLError):
    """Unknown role, or the role does not support this fault."""


def all_targets() -> list[Target]:
    """Everything that can be done to anybody.

    `asyncrl up` has no supervisor, so it is killed and resumed, never left frozen.
    """
    found = [Target(role, "kill") for role in ROLES]
    found += [Target(role, "freeze") for role in ROLES if role not in ("up", SEVERAL)]
    found += [Target(role, "wake") for role in ROLES if role != SEVERAL]
    return found + [Target(role, point) for point, roles in POINTS.items() for role in roles]


def parse_targets(text: str) -> list[Target]:
    """The targets that a comma-separated list names: `learner`, `nats:kill`, `engine@engine.swapped`,
    `@work.published`.

    Raises:
        TargetError: with what is allowed.
    """
    found: list[Target] = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        role, _, kind = word.replace("@", ":").partition(":")
        fitting = [
            target
            for target in all_targets()
            if role in (target.role, "") and kind in (target.kind, "") and ("@" not in word or target.family == "crash")
        ]
        if not fitting:
            raise TargetError(_why_not(word, role))
        found += [target for target in fitting if target not in found]
    return found or all_targets()


def drawn(targets: Sequence[Target], seed: int) -> Iterator[Target]:
    """Targets without end: each family as often, and within a family each role, or each role at each crash point."""
    dice = random.Random(seed)
    families = sorted({target.family for target in targets})
    while True:
        family = dice.choice(families)
        yield dice.choice([target for target in targets if target.family == family])


def each_point(targets: Sequence[Target], times: int, seed: int) -> Iterator[Target]:
    """Every crash point so often, in the order a seed draws, the roles that pass it taking turns."""
    dice = random.Random(seed)
    points = {target.kind for target in targets if target.family == "crash"}
    roles = {point: [target for target in targets if target.kind == point] for point in sorted(points)}
    for turn in range(times):
        for point in dice.sample(list(roles), len(roles)):
            yield roles[point][turn % len(roles[point])]


def _why_not(word: str, role: str) -> str:
    if role and role not in ROLES:
        return f"--targets {word}: no role is called {role!r}; expected one of {', '.join(ROLES)}"
    kinds = [str(target) for target in all_targets() if role in (target.role, "")]
    return f"--targets {word}: expected one of {', '.join(kinds if role else POINTS)}"
