"""Graders of rubric files: the judge is asked by the reward worker itself, as no code of a user runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.chat_endpoint import AskFailed
from asyncrl.child_pool.frames import CallFailed
from asyncrl.rewards.graders import GraderError, GradeResult
from asyncrl.rewards.rubrics import Ask, Rubric
from asyncrl.rewards.score import GradeRequest, read_score, read_scores
from asyncrl.rewards.tournaments import TournamentReward

Of = TypeVar("Of")


class RubricGrader:
    """The share of a rubric that one completion meets."""

    at_once = 1 << 20  # the worker bounds the number of calls

    def __init__(self, rubric: Rubric, time_limit_s: float) -> None:
        self._rubric, self._time_limit_s = rubric, time_limit_s

    async def grade(self, request: GradeRequest) -> GradeResult:
        """Ask the judge about each criterion."""
        asked = self._rubric.grade(request.completion, request.prompt)
        return GradeResult(*read_score(await _answered(asked, self._time_limit_s)))

    async def close(self) -> None:
        """Close the connections."""
        await self._rubric.close()


async def open_rubric(
    spec: str, *, base: Path, time_limit_s: float, ask: Ask | None = None, **_limits: object
) -> RubricGrader:
    """Read a rubric file.

    Args:
        ask: the judge; None: the endpoint that the file names.

    Raises:
        FunctionError: the file cannot be read, or names no judge.
    """
    return RubricGrader(Rubric.read(base / spec, ask), time_limit_s)


class RubricGroupGrader:
    """Scores of a group by a tournament: the judge compares two completions in both orders."""

    def __init__(self, rubric: Rubric, tournament: str, time_limit_s: float) -> None:
        """
        Raises:
            GraderError: there is no tournament, and a rubric compares two completions.
        """
        if not tournament:
            raise GraderError('a rubric grades a group by a tournament; set reward.tournament = "round_robin"')
        self._rubric, self._time_limit_s = rubric, time_limit_s
        self._reward = TournamentReward(tournament, rubric.compare)

    async def grade(self, requests: list[GradeRequest]) -> list[GradeResult | str]:
        """Rank the members of a group.

        Raises:
            CallFailed: the judge chose none of two, did not answer, or was too slow: no member has a score.
        """
        lists: dict[str, list[Any]] = {
            name: [getattr(request, name) for request in requests]
            for name in ("completion", "prompt", "label", "trajectory_id")
        }
        scores = read_scores(await _answered(self._reward(**lists), self._time_limit_s))
        return [score if isinstance(score, str) else GradeResult(*score) for score in scores]

    async def close(self) -> None:
        """Close the connections."""
        await self._rubric.close()


async def _answered(asked: Awaitable[Of], time_limit_s: float) -> Of:
    """Return what a judge answers within the limit.

    Raises:
        CallFailed: states why there is no answer.
    """
    try:
        async with asyncio.timeout(time_limit_s):
            return await asked
    except TimeoutError:
        raise CallFailed("time_limit", f"the judge gave no answer within {time_limit_s:g} s") from None
    except AskFailed as error:
        raise CallFailed("http", str(error)) from error
    except ValueError as error:
        raise CallFailed("value", str(error)) from error
