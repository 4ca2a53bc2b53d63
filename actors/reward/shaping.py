"""The reward of a grade as it is trained: shaped by the length of the trajectory."""

from __future__ import annotations

from typing import Any

from asyncrl.config.settings import Config
from asyncrl.rewards.shaping import overlong_penalty
from topics.ids import Stage


def shaped(config: Config, stage: Stage, tokens: int, reward: float, metrics: dict[str, float]) -> dict[str, Any]:
    """The fields `reward`, `metrics` and `unshaped` of a grade: in RL, over-long trajectories are punished.

    Args:
        tokens: of the trajectory, those that are trained.
    """
    overlong = config.reward.overlong
    if stage != "rl" or not overlong.penalty:
        return {"reward": reward, "metrics": metrics, "unshaped": None}
    longest = overlong.longest_tokens or config.rollout.max_new_tokens
    punishment = overlong.penalty * overlong_penalty(tokens, longest=longest, interval=overlong.interval_tokens)
    return {"reward": reward + punishment, "metrics": metrics | {"overlong": punishment}, "unshaped": reward}
