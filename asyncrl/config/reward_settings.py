"""Settings of the reward.

The comment at a field, beside or above it, is its documentation: `asyncrl settings` and docs/settings.md print it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from asyncrl.algorithms.named import names
from asyncrl.algorithms.tournaments import TOURNAMENTS
from asyncrl.config.setting_types import Count, NonNegative, Positive, Seconds, Settings

RewardScope: TypeAlias = Literal["trajectory", "group"]
if TYPE_CHECKING:
    TournamentName: TypeAlias = str
else:
    TournamentName = Literal[("", *names(TOURNAMENTS))]


class OverlongSettings(Settings):
    """Punishment of long trajectories of RL, added to their rewards: 0 up to `longest_tokens - interval_tokens`, then
    falling in proportion to `-penalty` at `longest_tokens` (DAPO, eq. 13)."""

    # Greatest punishment, of a trajectory as long as `longest_tokens` or longer; 0: none.
    penalty: NonNegative = 0.0
    longest_tokens: Count = 0  # Sampled tokens of a trajectory that are too many; 0 for `rollout.max_new_tokens`.
    interval_tokens: Positive = 4096  # Tokens before the longest within which the punishment grows.


class RewardSettings(Settings):
    """The reward: how a finished trajectory is graded."""

    # `exact`, `math`, `dapo`, `deepscaler`, `f1`, `gpqa`, `ifbench`, `ifeval`, `reasoning-gym`, an `http://` address,
    # `path/file.py:function` or `package.module:function`;
    # empty where the rollout function gives every reward (`context.outcome`).
    function: str = "exact"
    # What one call grades: `trajectory`, or `group` where a score depends on the other answers to the same row. A
    # function of yours then gets lists over the members of the group, once all are generated or have failed.
    scope: RewardScope = "trajectory"
    # Tournament among the members of a group, with `scope = "group"`: `function` is then your comparison of two,
    # called as `judge(first, second, prompt, label)` (docs/write-a-reward.md). Empty: it grades the group itself.
    tournament: TournamentName = ""
    # Seconds that all comparisons of one group may take together, instead of `time_limit_s`.
    tournament_limit_s: Seconds = 300.0
    # Reward worker processes at start; as many more grade whole groups where a reward is of that scope.
    workers: Positive = 1
    children: Positive = 1  # Child processes a worker runs user functions in.
    # Completions that one call of a function of yours grades at most: above 1 it is given lists and returns a list.
    batch: Positive = 1
    # Seconds one call may take before its child process is killed and the trajectory fails.
    time_limit_s: Seconds = 30.0
    # MB that each process of a user function may write to (data, not files or libraries it maps); beyond them the
    # trajectory fails. 0 for no limit.
    memory_mb: Count = 4096
    in_flight: Positive = 256  # Trajectories a reward worker holds at once.
    overlong: OverlongSettings = msgspec.field(default_factory=OverlongSettings)
