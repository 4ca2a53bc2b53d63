"""Judges that are functions: a rule over words, or one of the user's in a child process."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.child_pool.frames import CallFailed, Service, Setup
from asyncrl.child_pool.pool import ChildPool
from asyncrl.config.check import not_a_function
from asyncrl.config.finding import Finding
from asyncrl.config.live_settings import JudgeKind, JudgeSettings
from asyncrl.errors import FunctionError
from asyncrl.functions import is_async, load_function
from asyncrl.judges.protocol import SCORES, Case, JudgeParts, Vote, VoteFailed
from asyncrl.judges.quoting import cut_hint

_GOOD = frozenset({"good", "great", "perfect", "nice", "thanks", "thank", "correct", "right", "works", "exactly"})
_BAD = frozenset({"bad", "no", "not", "wrong", "incorrect", "instead", "again", "error", "failed", "worse", "useless"})
_MEMORY_MB = 4096


class WordsJudge:
    """The first of certain English words in the evidence decides: `good`, `thanks`, ..., or `no`, `wrong`, `again`, ...

    Nothing in the reply or the prompt counts, and of a text like "score: +1" nothing does.
    """

    name = "rule"

    async def vote(self, case: Case) -> Vote:
        """Look for the first word; it cannot hang and runs in the calling process."""
        if not case.evidence.strip():
            raise VoteFailed("nothing followed the reply")
        for word in re.findall(r"[a-z]+", case.evidence.lower()):
            if word in _GOOD or word in _BAD:
                return Vote(1 if word in _GOOD else -1)
        return Vote(0)

    async def close(self) -> None:
        """Nothing was started."""


class FunctionJudge:
    """The vote that a function of the user's in a child process returns."""

    def __init__(self, spec: str, pool: ChildPool) -> None:
        self.name = f"rule:{spec}"
        self._pool = pool

    async def vote(self, case: Case) -> Vote:
        """Run the function in a child."""
        try:
            return msgspec.convert(await self._pool.call(case), Vote)
        except CallFailed as error:
            raise VoteFailed(error.reason, f": {error.detail}") from None

    async def close(self) -> None:
        """Kill the children."""
        await self._pool.close()


async def open_judge(parts: JudgeParts) -> WordsJudge | FunctionJudge:
    """Open the function of the settings, or the rule over words if they name none."""
    settings = parts.settings
    if not settings.function:
        return WordsJudge()
    setup = judge_setup(settings.function, base=parts.base, time_limit_s=settings.deadline_s)
    return FunctionJudge(settings.function, await ChildPool.open(setup, workers=settings.children))


def judge_setup(spec: str, *, base: Path, time_limit_s: float) -> Setup:
    """Return the setup by which a child loads a judge."""
    arguments = {"spec": spec, "base": str(base)}
    return Setup(spec, f"{__name__}:serve_judge", arguments, time_limit_s, _MEMORY_MB, silent=True)


def serve_judge(spec: str, base: str) -> Service:
    """Load a judge.

    Raises:
        FunctionError: it cannot be found or loaded, or asks for what a case does not have.
    """
    function = load_function(spec, base=Path(base))
    known = Case.__struct_fields__
    parameters = inspect.signature(function).parameters.values()
    wrong = [one.name for one in parameters if one.name not in known and one.default is one.empty]
    if wrong or not parameters:
        raise FunctionError(
            f"{spec}: the judge asks for {', '.join(map(repr, wrong)) or 'nothing'}; it may name {', '.join(known)}"
        )
    names = [one.name for one in parameters if one.name in known]
    return Service(functools.partial(_call, function, names), _vote_of, is_async(function))


def _call(function: Callable[..., Any], names: list[str], case: dict[str, Any]) -> Any:
    return function(**{name: case[name] for name in names})


def _vote_of(value: Any) -> Vote:
    """Read what a judge returned: a score, or a mapping with "score" and perhaps "hint".

    Raises:
        CallFailed: with reason `value`.
    """
    given = value if isinstance(value, Mapping) else {"score": value}
    score, hint = given.get("score"), given.get("hint", "")
    if isinstance(score, bool) or score not in SCORES or not isinstance(hint, str):
        words = f'the judge returned {repr(value)[:200]}; expected -1, 0 or 1, or {{"score": ..., "hint": "..."}}'
        raise CallFailed("value", words)
    return Vote(int(score), cut_hint(hint))


class Rule(JudgeKind):
    """A function of the user, or a rule over words."""

    keys = ("function", "children")
    opener = "asyncrl.judges.rule:open_judge"

    def checks(self, judge: JudgeSettings) -> Iterator[Finding]:
        if judge.function:
            yield from not_a_function("live.judge.function", judge.function)

    def hint_problem(self, judge: JudgeSettings) -> str:
        return "" if judge.function else "words give none; set live.judge.function, or another judge"

    def setup(self, judge: JudgeSettings, base: Path) -> Setup | None:
        if ":" not in judge.function:
            return None
        return judge_setup(judge.function, base=base, time_limit_s=judge.deadline_s)


KIND = Rule()
