"""The built-in rewards that run in child processes: a new one is a scorer and a row of `BUILT_IN`."""

from __future__ import annotations

from typing import Any, NamedTuple

from asyncrl.environments.kinds import KINDS, environment_of
from asyncrl.rewards.instructions import INSTRUCTION_REWARDS

_OF_ENVIRONMENT = "asyncrl.environments.reward:make_reward"


class BuiltIn(NamedTuple):
    """A reward that configs name by a word."""

    spec: str  # `module:function`, which is the reward, or makes it
    arguments: dict[str, Any] | None = None  # with which it makes the reward; None: it is the reward
    reads_label: bool = True  # of a row; so each row must have one


BUILT_IN: dict[str, BuiltIn] = {
    "math": BuiltIn("asyncrl.rewards.scorers:make_math", {}),
    "dapo": BuiltIn("asyncrl.rewards.answers:dapo"),
    "last_number": BuiltIn("asyncrl.rewards.answers:last_number"),
    "deepscaler": BuiltIn("asyncrl.rewards.answers:make_deepscaler", {}),
    "f1": BuiltIn("asyncrl.rewards.answers:f1"),
    "gpqa": BuiltIn("asyncrl.rewards.answers:gpqa"),
    **{
        f"boxed_{reward}": BuiltIn("asyncrl.rewards.answers:make_boxed", {"reward": reward})
        for reward in ("math", "f1", "gpqa")
    },
    **{
        name: BuiltIn("asyncrl.rewards.instructions:make_instructions", {"benchmark": name}, reads_label=False)
        for name in INSTRUCTION_REWARDS
    },
    **{kind: BuiltIn(_OF_ENVIRONMENT, {"kind": kind, "name": ""}) for kind in KINDS},
    "random": BuiltIn("asyncrl.rewards.answers:by_chance", reads_label=False),
}

NAMED_REWARDS = ("exact", *BUILT_IN)
"""All rewards with a name; `exact` runs in the calling process."""


def built_in(reward: str) -> BuiltIn | None:
    """The row of a reward with a name, or of the environment in `KIND:NAME`."""
    if (named := environment_of(reward)) is not None:
        kind, name = named
        return BuiltIn(_OF_ENVIRONMENT, {"kind": kind, "name": name})
    return BUILT_IN.get(reward)


def reads_label(reward: str) -> bool:
    """Return whether a reward is known to read the label of each row; of a user's own it is not known."""
    row = built_in(reward)
    return reward == "exact" or (row is not None and row.reads_label)
