"""Common ground of judges: a case, a vote, and a verdict of several votes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from asyncrl.errors import AsyncRLError

if TYPE_CHECKING:
    from asyncrl.config.live_settings import JudgeSettings
    from asyncrl.data.tokenizer import TaskTokenizer
    from asyncrl.engine.generator import Generator

SCORES = (-1, 0, 1)
HINTS = 3  # candidates of a turn: its teacher scores the reply after each


class VoteFailed(AsyncRLError):
    """A vote that was not given, with the reason; the other votes on the turn are not touched."""

    def __init__(self, reason: str, detail: str = "") -> None:
        """
        Args:
            reason: without any client text, because logs contain it.
            detail: what follows it in the error, which may quote a user or an answer.
        """
        super().__init__(reason + detail)
        self.reason = reason


class Case(msgspec.Struct, frozen=True):
    """One turn before its judge: texts, special tokens left out."""

    turn_id: str
    prompt: str  # the conversation up to the reply, or its end if it is long
    reply: str
    evidence: str  # all that was appended since: the user's answer, results of tools


class Vote(msgspec.Struct, frozen=True):
    """One opinion about a reply."""

    score: int  # one of SCORES: 1 for a good reply, -1 for a bad one, 0 where the evidence shows neither
    hint: str = ""  # how the reply should have been, as a hint for writing it again


class Verdict(msgspec.Struct, frozen=True):
    """The outcome of the votes on a turn."""

    reward: float | None  # None: there is no valid vote
    hints: tuple[str, ...] = ()  # different ones, the longest first


class JudgeParts(NamedTuple):
    """Parts of a run from which a judge is opened."""

    settings: JudgeSettings
    base: Path  # that paths of the settings start from
    tokenizer: TaskTokenizer
    open_generator: Callable[[], Awaitable[Generator]]  # over the engines that vote
    first_version: int  # of the run's weights


class Judge(Protocol):
    """Votes on turns, many at a time."""

    name: str  # for `turn.judged`

    async def vote(self, case: Case) -> Vote:
        """Give one vote; further calls about the same case give further ones.

        Raises:
            VoteFailed: there is none. The caller bounds the time.
        """

    async def close(self) -> None:
        """End the processes that judge."""


def verdict_of(votes: Sequence[Vote]) -> Verdict:
    """Return the majority of valid votes: 0.0 if two scores are tied, no reward without votes.

    The hints are those of the votes that agree with the majority, `HINTS` of them at most.

    Source: OpenClaw-RL, arXiv 2603.10165, majority of m votes; there a turn without any valid vote counts as 0.
    """
    counts = Counter(vote.score for vote in votes).most_common(2)
    if not counts:
        return Verdict(None)
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        return Verdict(0.0)
    score = counts[0][0]
    hints = {vote.hint for vote in votes if vote.score == score and vote.hint}
    return Verdict(float(score), tuple(sorted(hints, key=lambda hint: (-len(hint), hint))[:HINTS]))
