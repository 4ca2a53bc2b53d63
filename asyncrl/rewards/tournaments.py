"""The reward of a group by a tournament: the user's own judge compares two of its completions at a time."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

from asyncrl.algorithms.tournaments import TOURNAMENTS
from asyncrl.errors import FunctionError
from asyncrl.rewards.score import finite


class TournamentReward:
    """A reward of many completions by a judge of two: `reward = TournamentReward("swiss", judge)` in a user's file.

    The judge is called as `judge(first, second, prompt, label)` with two completions of one prompt, plain or async. It
    returns the share of the first in [0, 1] (1.0: it is better, 0.5: equal), or a score for each of the two.
    """

    def __init__(self, tournament: str, judge: Callable[..., Any]) -> None:
        """
        Args:
            tournament: a name in `TOURNAMENTS`.

        Raises:
            FunctionError: there is no such tournament, or the judge is called otherwise, or is one itself.
        """
        if tournament not in TOURNAMENTS:
            raise FunctionError(f"no tournament {tournament!r}; there are {', '.join(TOURNAMENTS)}")
        if isinstance(judge, TournamentReward):
            raise FunctionError("it is a tournament itself, expected a judge of two; set no reward.tournament with it")
        try:
            inspect.signature(judge).bind("first", "second", "prompt", "label")
        except (TypeError, ValueError) as error:
            raise FunctionError(f"the judge is called with first, second, prompt and label, and {error}") from error
        self._tournament, self._judge = TOURNAMENTS[tournament], judge

    async def __call__(
        self, completion: list[str], prompt: list[Any], label: list[Any], trajectory_id: list[str]
    ) -> list[float]:
        """Scores of the members of a group, by place. Random choices follow from their names.

        Raises:
            ValueError: there is one member, they are of several prompts, or the judge returned no scores.
        """
        if len(completion) < 2:
            raise ValueError("one completion: a tournament compares at least two of one prompt")
        if any(one != prompt[0] for one in prompt):
            raise ValueError("completions of several prompts in one tournament; it compares those of one group")

        async def compare(left: int, right: int) -> tuple[float, float]:
            verdict = self._judge(completion[left], completion[right], prompt[0], label[0])
            return _scores(await verdict if inspect.isawaitable(verdict) else verdict)

        return await self._tournament(len(completion), compare, random.Random(trajectory_id[0]))


def _scores(verdict: Any) -> tuple[float, float]:
    """Read what a judge returned."""
    if isinstance(verdict, tuple | list):
        if len(verdict) != 2:
            raise ValueError(f"the judge returned {len(verdict)} scores, expected one for each of two completions")
        return finite(verdict[0], "the judge returned"), finite(verdict[1], "the judge returned")
    share = finite(verdict, "the judge returned")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the judge returned {share:g}, expected the share of the first completion, from 0 to 1")
    return share, 1.0 - share
