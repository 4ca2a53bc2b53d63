"""The rewards that `reward.function` can name, and what each of them can do."""

from __future__ import annotations

from typing import Any, NamedTuple

from asyncrl.addresses import is_address
from asyncrl.environment_names import EnvironmentCapability, environment_can, kinds_that_can
from asyncrl.functions import FORMS as FUNCTIONS
from asyncrl.functions import is_function
from asyncrl.rewards.instructions import INSTRUCTION_REWARDS

_OF_ENVIRONMENT = "asyncrl.environments.reward:make_reward"


class Reward(NamedTuple):
    """A reward. Code that grades or checks asks for these fields, never for a name."""

    spec: str = ""  # `module:function` that a child process calls, which is the reward, or makes it; empty: no child
    arguments: dict[str, Any] | None = None  # with which it makes the reward; None: it is the reward
    reads_label: bool = True  # of a row; so each row must have one
    grader: str = "asyncrl.rewards.graders:open_child"  # module:name of what opens its `asyncrl.rewards.graders.Grader`
    lists: bool = False  # it can take lists: of completions, or of the members of a group
    loaded: bool = False  # checks load it: it needs files or packages that only the user can provide
    compares: bool = False  # it compares text with the label, which takes no time
    remote: bool = False  # a server grades, which may be down
    judged: bool = False  # a rubric file: a model grades or compares


BUILT_IN: dict[str, Reward] = {
    "exact": Reward(grader="asyncrl.rewards.graders:open_exact", compares=True),
    "math": Reward("asyncrl.rewards.scorers:make_math", {}),
    "dapo": Reward("asyncrl.rewards.answers:dapo"),
    "last_number": Reward("asyncrl.rewards.answers:last_number"),
    "deepscaler": Reward("asyncrl.rewards.answers:make_deepscaler", {}),
    "f1": Reward("asyncrl.rewards.answers:f1"),
    "gpqa": Reward("asyncrl.rewards.answers:gpqa"),
    **{
        f"boxed_{reward}": Reward("asyncrl.rewards.answers:make_boxed", {"reward": reward})
        for reward in ("math", "f1", "gpqa")
    },
    **{
        name: Reward(
            "asyncrl.rewards.instructions:make_instructions", {"benchmark": name}, reads_label=False, loaded=True
        )
        for name in INSTRUCTION_REWARDS
    },
    **{
        kind: Reward(_OF_ENVIRONMENT, {"kind": kind, "name": ""})
        for kind in kinds_that_can(EnvironmentCapability.SCORE)
    },
    "random": Reward("asyncrl.rewards.answers:by_chance", reads_label=False),
}
"""The rewards with a name: a new one is a scorer and a row here."""

_SCORING = tuple(f"{kind}:NAME" for kind in kinds_that_can(EnvironmentCapability.SCORE))
FORMS = (*BUILT_IN, *_SCORING, "http://ADDRESS", "RUBRIC.toml", *FUNCTIONS)
"""How messages name all rewards."""


def reward_of(spec: str) -> Reward | None:
    """Return the reward that a text names; None if it names no reward."""
    if is_function(spec):
        return Reward(spec, reads_label=False, lists=True, loaded=True)
    if is_address(spec, "http", "https"):
        return Reward(reads_label=False, grader="asyncrl.rewards.server:open_server", remote=True)
    if spec.endswith(".toml"):
        grader = "asyncrl.rewards.rubric_graders:open_rubric"
        return Reward(reads_label=False, grader=grader, lists=True, remote=True, judged=True)
    if spec not in BUILT_IN and environment_can(spec, EnvironmentCapability.SCORE):
        kind, _, name = spec.partition(":")
        return Reward(_OF_ENVIRONMENT, {"kind": kind, "name": name}, loaded=True)
    return BUILT_IN.get(spec)


def is_judged(spec: str) -> bool:
    """Return whether a model grades or compares by a rubric file."""
    reward = reward_of(spec)
    return reward is not None and reward.judged
