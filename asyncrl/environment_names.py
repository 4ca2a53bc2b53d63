"""The names of environments, and what each kind of them can do."""

from __future__ import annotations

import enum

ROLLOUT = "environment"
"""The value of `task.rollout` by which the policy works in the environment of its row."""


class EnvironmentCapability(enum.Enum):
    """A service that some kinds of environments give. Core code asks for it, never for the name of a kind."""

    SCORE = enum.auto()  # scores an answer to a row: `reward.function` may name it
    EPISODE = enum.auto()  # takes replies one after the other: `task.rollout = "environment"`
    PROGRAM = enum.auto()  # its program works with the policy as model: `task.rollout = "environment"`
    TESTS = enum.auto()  # rows have files and tests, for `task.rollout = "harness:NAME"`
    PATH = enum.auto()  # its name is a path


_CAPABILITIES = {
    "reasoning-gym": {EnvironmentCapability.SCORE},
    "text": {EnvironmentCapability.EPISODE, EnvironmentCapability.PATH},
    "harbor": {EnvironmentCapability.TESTS, EnvironmentCapability.PATH},
    "verifiers": {EnvironmentCapability.SCORE, EnvironmentCapability.PROGRAM},
    "openenv": {EnvironmentCapability.EPISODE},
}
KINDS = tuple(_CAPABILITIES)
"""The kinds: `KIND` of the module `asyncrl.environments.NAME.kind`, with `_` for `-`, makes those of each."""

FORMS = tuple(f"{kind}:NAME" for kind in KINDS)
"""How messages name an environment of each kind."""


def is_environment(spec: str) -> bool:
    """Return whether `spec` is `KIND:NAME`, or a `KIND` without a name."""
    return spec.partition(":")[0] in KINDS


def environment_can(spec: str, capability: EnvironmentCapability) -> bool:
    """Return whether `spec` is an environment, and its kind has a capability."""
    return capability in _CAPABILITIES.get(spec.partition(":")[0], ())


def kinds_that_can(capability: EnvironmentCapability) -> tuple[str, ...]:
    """Return the kinds with a capability."""
    return tuple(kind for kind in KINDS if environment_can(kind, capability))


def split_path(spec: str) -> tuple[str, str]:
    """Return the kind of an environment whose name is a path, as `KIND:`, and that path; of other texts "" and it."""
    if not environment_can(spec, EnvironmentCapability.PATH):
        return "", spec
    kind, colon, path = spec.partition(":")
    return kind + colon, path
