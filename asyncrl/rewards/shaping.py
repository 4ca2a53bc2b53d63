"""Shaping of rewards by the length of the trajectory."""

from __future__ import annotations

from typing import Any

from asyncrl.config.settings import Config
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


def overlong_penalty(tokens: int, *, longest: int, interval: int) -> float:
    """Punishment of long trajectories, from 0 down to -1.

    0 up to `longest - interval` tokens, then falling in proportion, -1 at `longest` and beyond it.
    Source: soft over-long punishment of DAPO (arXiv 2503.14476, eq. 13), with `longest` for L_max and `interval` for
    L_cache.
    """
    free = longest - interval
    if tokens <= free:
        return 0.0
    return (free - tokens) / interval if tokens <= longest else -1.0
