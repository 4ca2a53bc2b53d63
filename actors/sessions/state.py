"""The state of the keeper of sessions, as plain data."""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.sessions.watched import Watched
from topics.turns import SkipReason


class Verdict(msgspec.Struct):
    """The grade of a turn so far; a user's stands against a judge's."""

    by: Literal["judge", "user"]
    reward: float | None  # None: no valid vote
    shadow: float | None = None  # of a judge: the reward of the turn's shadow answer
    trial: int = 0  # of that


class OpenTurn(msgspec.Struct):
    """A turn that has no end yet."""

    session: str
    tenant: str
    temperature: float
    finished: bool = False
    skip: SkipReason | None = None
    evidence: list[str] = []  # turns that continue it
    verdict: Verdict | None = None
    newest: int = 0  # version of its tokens
    same: str = ""
    secrets: str = ""  # data keys that reading it takes
    trial: int = 0  # as in its turn.finished
    canary: bool = False


class OpenSession(msgspec.Struct):
    """A session that is not closed."""

    newest: int  # sequence in TURNS of the newest message about it
    newest_ns: int  # server's clock then
    left: bool = False  # the client ended it
    turns: set[str] = msgspec.field(default_factory=set)  # open ones that are not ready


class OnWay(msgspec.Struct):
    """An admitted turn that is in no batch yet, and has no end."""

    turn: str
    tenant: str
    reward: float  # that it is to be trained with, as far as that is on the log
    wanted: float  # by its user, else the same


class UnderWay(msgspec.Struct):
    """Admitted turns by prompt, until they are in a batch or end."""

    prompts: dict[str, OnWay] = {}
    names: dict[str, str] = {}  # prompts by turn
    overruling: dict[str, None] = {}  # prompts whose users want another reward, which is not on the log yet
    late: int = 0  # batches that came before what a user wanted

    def admit(self, prompt: str, turn: OnWay) -> None:
        """Take note of an admitted turn."""
        self.prompts[prompt], self.names[turn.turn] = turn, prompt
        self.want(prompt, turn.wanted)

    def want(self, prompt: str, reward: float) -> None:
        """Take note of what a user says of a turn."""
        turn = self.prompts[prompt]
        turn.wanted = reward
        self.overruling.pop(prompt, None)
        if reward != turn.reward:
            self.overruling[prompt] = None

    def overrule(self, prompt: str, reward: float) -> None:
        """Take note that it is on the log."""
        if prompt in self.prompts:
            self.prompts[prompt].reward = reward
            self.want(prompt, self.prompts[prompt].wanted)

    def end(self, prompt: str, trained: float | None) -> bool:
        """Take a turn from those under way; False where it was not among them.

        Args:
            trained: reward in its batch; None where it is in none.
        """
        turn = self.prompts.pop(prompt, None)
        if turn is None:
            return False
        del self.names[turn.turn]
        self.overruling.pop(prompt, None)
        self.late += trained is not None and trained != turn.wanted
        return True


class SessionsState(msgspec.Struct):
    """The whole state, which snapshots hold. A field whose meaning changes gets another name."""

    turns: dict[str, OpenTurn] = {}
    waiting: dict[str, int] = {}  # turns that are ready, in that order, and when they became so by the server's clock
    sessions: dict[str, OpenSession] = {}  # the one with the oldest activity first
    due: dict[str, None] = {}  # turns about which something may be decided, in the order of what came
    emptied: dict[str, None] = {}  # sessions that a client ended, where no turn is left
    # Records of the own log that were read before what they follow from: logs have no common order.
    ended_early: set[str] = set()  # turns
    ready_early: dict[str, int] = {}  # turns, and when they became ready
    closed_early: dict[str, int] = {}  # sessions, and the sequence in TURNS up to which they are closed
    graded: dict[str, None] = {}  # turns that wait to be admitted, the newest last
    on_way: UnderWay = msgspec.field(default_factory=UnderWay)
    ended_prompts: set[str] = set()  # whose end was read before their admission
    skipped: dict[str, int] = {}  # turns by reason
    purged: set[str] = set()  # data keys that were erased
    admitted: int = 0
    trained: int = 0  # newest step
    watched: Watched = msgspec.field(default_factory=Watched)
    late_feedback: int = 0  # of turns that were in a batch before, or have another end, or are another tenant's
