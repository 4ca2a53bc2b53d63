"""The state of the keeper of sessions, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
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
    siblings: str = ""  # as in its turn.started
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
    """Admitted turns by the prompt of their group, until that is in a batch or ends."""

    groups: dict[str, list[OnWay]] = {}
    places: dict[str, tuple[str, int]] = {}  # prompt and member, by turn
    asked: dict[str, None] = {}  # turns whose users want another reward, which is not on the log yet
    late: int = 0  # turns whose batch came before what a user wanted

    def admit(self, prompt: str, turns: list[OnWay]) -> None:
        """Take note of an admitted group."""
        self.groups[prompt] = turns
        for member, turn in enumerate(turns):
            self.places[turn.turn] = prompt, member
            self.want(turn, turn.wanted)

    def of(self, name: str) -> OnWay | None:
        """Return a turn under way; None where it is not."""
        prompt, member = self.places.get(name, ("", 0))
        return self.groups[prompt][member] if prompt else None

    def want(self, turn: OnWay, reward: float) -> None:
        """Take note of what a user says of a turn."""
        turn.wanted = reward
        self.asked.pop(turn.turn, None)
        if reward != turn.reward:
            self.asked[turn.turn] = None

    def overrule(self, name: str, reward: float) -> None:
        """Take note that it is on the log."""
        if (turn := self.of(name)) is not None:
            turn.reward = reward
            self.want(turn, turn.wanted)

    def end(self, prompt: str, trained: Mapping[int, float]) -> bool:
        """Take a group from those under way; False where it was not among them.

        Args:
            trained: rewards in its batch, by member.
        """
        turns = self.groups.pop(prompt, None)
        for member, turn in enumerate(turns or ()):
            del self.places[turn.turn]
            self.asked.pop(turn.turn, None)
            self.late += member in trained and trained[member] != turn.wanted
        return turns is not None


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
    families: dict[str, list[str]] = {}  # turns without an end that have one prompt, by what they have in common
    holding: dict[str, int] = {}  # graded turns that wait for those, and since when by the server's clock
    on_way: UnderWay = msgspec.field(default_factory=UnderWay)
    ended_prompts: set[str] = set()  # whose end was read before their admission
    skipped: dict[str, int] = {}  # turns by reason
    purged: set[str] = set()  # data keys that were erased
    admitted: int = 0
    trained: int = 0  # newest step
    watched: Watched = msgspec.field(default_factory=Watched)
    late_feedback: int = 0  # of turns that were in a batch before, or have another end, or are another tenant's
