"""Rewards: what turns a completion into a number."""

from __future__ import annotations

import asyncio
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple, Protocol

import msgspec

from asyncrl.background import BackgroundTasks
from asyncrl.child_pool.frames import CallFailed
from asyncrl.child_pool.pool import ChildPool
from asyncrl.errors import AsyncRLError
from asyncrl.rewards.kinds import FORMS, reward_of
from asyncrl.rewards.score import GradeRequest
from asyncrl.rewards.serving import reward_setup

_GATHER_S = 0.05  # that a call waits for more completions


class GraderError(AsyncRLError):
    """A reward that no grader is known for."""

    fatal = True


class GradeResult(msgspec.Struct):
    """The reward of one trajectory."""

    reward: float
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class Grader(Protocol):
    """Grades completions, many at a time."""

    at_once: int  # requests that do not wait for each other

    async def grade(self, request: GradeRequest) -> GradeResult:
        """Grade one completion.

        Raises:
            CallFailed: states why this one has no reward; others in flight are not touched.
        """

    async def close(self) -> None:
        """End the processes that grade."""


async def open_grader(
    spec: str, *, base: Path, workers: int = 1, time_limit_s: float = 30.0, memory_mb: int = 0, batch: int = 1
) -> Grader:
    """Open the reward that `spec` names.

    Args:
        spec: `exact` (completion equals label, both stripped), `math` (by math-verify), `dapo`, `deepscaler`, `f1` and
            `gpqa`, `ifbench` and `ifeval` (docs/guides/write-a-reward.md), `KIND:NAME` or `KIND` (an environment,
            that of the row without a name), `http://...` or `https://...`, a rubric file as `path/to/file.toml`, or a
            user's function as `path/to/file.py:function` or `package.module:function`.
        workers: child processes that run functions.
        time_limit_s: seconds that one request may take from the beginning of its turn, retries included.
        memory_mb: MB that each process of a function may take; 0 for no limit.
        batch: completions that one call of a user's function grades at most; above 1 it is given lists.

    Raises:
        GraderError: unknown reward.
        FunctionError: the user's function cannot be found or loaded.
    """
    reward = reward_of(spec)
    if reward is None:
        raise GraderError(f"unknown reward {spec!r}; known are {', '.join(FORMS)}")
    limits = {"base": base, "workers": workers, "time_limit_s": time_limit_s, "memory_mb": memory_mb, "batch": batch}
    grader: Grader = await resolve_name(reward.grader)(spec, **limits)
    return grader


class ExactGrader:
    """1.0 where completion and label are equal but for white space around them, else 0.0."""

    at_once = 1

    async def grade(self, request: GradeRequest) -> GradeResult:
        """Compare; it cannot hang and runs in the calling process."""
        return GradeResult(float(request.completion.strip() == str(request.label).strip()))

    async def close(self) -> None:
        """Nothing was started."""


async def open_exact(_spec: str, **_limits: object) -> ExactGrader:
    """Compare here."""
    return ExactGrader()


class ChildGrader:
    """The number that a function in a child process returns."""

    def __init__(self, pool: ChildPool) -> None:
        self.at_once = pool.at_once
        self._pool = pool

    async def grade(self, request: GradeRequest) -> GradeResult:
        """Run the function in a child."""
        return GradeResult(*await self._pool.call(request))

    async def close(self) -> None:
        """Kill the children."""
        await self._pool.close()


async def open_child(
    spec: str, *, base: Path, workers: int, time_limit_s: float, memory_mb: int, batch: int
) -> ChildGrader | BatchGrader:
    """Start the children of a function.

    Raises:
        FunctionError: it cannot be found or loaded.
    """
    setup = reward_setup(spec, base=base, time_limit_s=time_limit_s, memory_mb=memory_mb, batch=batch)
    assert setup is not None
    pool = await ChildPool.open(setup, workers=workers)
    return BatchGrader(pool, batch) if setup.arguments["lists"] else ChildGrader(pool)


class BatchGrader:
    """The numbers that a function in a child process returns for many completions at once.

    A call waits a moment for more completions, until there are as many as it may take. If it raises, ends its process,
    exceeds its limit or returns another number of scores, each of its completions is graded by a separate call, so that
    only the faulty ones fail.
    """

    def __init__(self, pool: ChildPool, most: int) -> None:
        self.at_once = pool.at_once * most
        self._pool = pool
        self._most = most  # completions of one call
        self._waiting: list[tuple[GradeRequest, asyncio.Future[GradeResult]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._calls = BackgroundTasks()

    async def grade(self, request: GradeRequest) -> GradeResult:
        """Join the next call."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[GradeResult] = loop.create_future()
        self._waiting.append((request, result))
        if len(self._waiting) >= self._most:
            self._begin()
        elif self._timer is None:
            self._timer = loop.call_later(_GATHER_S, self._begin)
        return await result

    async def close(self) -> None:
        """Kill the children; running calls fail."""
        self._begin()
        await self._pool.close()
        await self._calls.ended()

    def _begin(self) -> None:
        """Begin the call of those that wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        jobs, self._waiting = self._waiting, []
        if jobs:
            self._calls.start(self._call(jobs))

    async def _call(self, jobs: list[tuple[GradeRequest, asyncio.Future[GradeResult]]]) -> None:
        try:
            scores = await self._pool.call([request for request, _ in jobs])
            if len(scores) != len(jobs):
                raise CallFailed("value", f"the function returned {len(scores)} scores for {len(jobs)} completions")
        except CallFailed as error:
            if len(jobs) > 1 and error.reason != "closed":
                await asyncio.gather(*(self._call([job]) for job in jobs))
                return
            scores = [error] * len(jobs)
        for (_, result), score in zip(jobs, scores, strict=True):
            if result.done():  # its caller is gone
                continue
            if isinstance(score, CallFailed | str):
                result.set_exception(CallFailed("value", score) if isinstance(score, str) else score)
            else:
                result.set_result(GradeResult(*score))


class GroupReward(NamedTuple):
    """The reward of whole groups."""

    function: str  # of the user's, `path/to/file.py:function` or `package.module:function`
    tournament: str = ""  # in which it compares two, a name in `TOURNAMENTS`; "" if it grades the group itself


class GroupGrader:
    """The numbers that one call of a function in a child process returns for all members of a group."""

    def __init__(self, pool: ChildPool) -> None:
        self._pool = pool

    @classmethod
    async def open(
        cls, reward: GroupReward, *, base: Path, workers: int, time_limit_s: float, memory_mb: int, most: int
    ) -> GroupGrader:
        """Open the user's function of a reward, as `open_grader` does.

        Args:
            most: members of a group.

        Raises:
            GraderError: it is none.
            FunctionError: it cannot be found or loaded.
        """
        spec = reward.function
        setup = reward_setup(
            spec,
            base=base,
            time_limit_s=time_limit_s,
            memory_mb=memory_mb,
            batch=max(2, most),
            tournament=reward.tournament,
        )
        if setup is None or not setup.arguments["lists"]:
            raise GraderError(f"the reward {spec!r} of a group is none; expected FILE.py:FUNCTION or MODULE:FUNCTION")
        return cls(await ChildPool.open(setup, workers=workers))

    async def grade(self, requests: list[GradeRequest]) -> list[GradeResult | str]:
        """Grade all members of a group.

        Returns:
            For each the reward, or why it has none.

        Raises:
            CallFailed: the call failed: states why no member has one.
        """
        scores = await self._pool.call(requests)
        if len(scores) != len(requests):
            detail = f"the function returned {len(scores)} scores for the {len(requests)} members of a group"
            raise CallFailed("value", detail)
        return [score if isinstance(score, str) else GradeResult(*score) for score in scores]

    async def close(self) -> None:
        """Kill the children."""
        await self._pool.close()
