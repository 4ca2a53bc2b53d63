"""The state of the keeper of sessions, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from asyncrl.live.agreement import NEWEST, Agreement
from topics.turns import SkipReason

_SAMES = 4096  # turns among which repeats are counted
_LEAST = 16  # of a figure that says something


class Watched(msgspec.Struct):
    """Counts of turns for alarms and caps: figures of the newest ones; lists have the newest entry last."""

    first_lengths: list[int] = []  # tokens of the first replies
    lengths: list[int] = []  # of the newest ones
    invalid_calls: list[bool] = []  # by reply
    questions: list[bool] = []
    agreement: Agreement = msgspec.field(default_factory=Agreement)
    sames: dict[str, int] = {}  # admitted turns with the same prompt and reply
    clipped: int = 0  # rewards

    def reply(self, tokens: int, marks: Sequence[str]) -> None:
        """Take note of a whole reply."""
        if len(self.first_lengths) < NEWEST:
            self.first_lengths.append(tokens)
        _keep(self.lengths, tokens)
        _keep(self.invalid_calls, "invalid call" in marks)
        _keep(self.questions, "question" in marks)

    def admit(self, same: str) -> None:
        """Take note of a turn that is to be trained."""
        if same:
            self.sames[same] = self.sames.pop(same, 0) + 1
            while len(self.sames) > _SAMES:
                del self.sames[next(iter(self.sames))]

    def figures(self) -> dict[str, float]:
        """Return vital signs by which the doctor raises alarms; those of which too few turns are known are left out."""
        shares = {
            "invalid_calls": self.invalid_calls,
            "questions": self.questions,
            "disagreement": self.agreement.against,
        }
        found = {f"live_{name}": _mean(flags) for name, flags in shares.items() if len(flags) >= _LEAST}
        if len(self.first_lengths) == NEWEST:
            found["live_length_drift"] = _mean(self.lengths) / max(_mean(self.first_lengths), 1.0)
        return found | {"rewards_clipped": float(self.clipped)}


def _keep(newest: list[int] | list[bool], value: int) -> None:
    newest.append(value)  # type: ignore[arg-type]  # a flag is a number
    del newest[:-NEWEST]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Verdict(msgspec.Struct):
    """The grade of a turn so far; a user's grade overrules a judge's."""

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
        """Return an admitted turn that is in no batch yet; None if the turn is not admitted."""
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
        """Remove a group from the admitted ones; False if it was not among them.

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
    emptied: dict[str, None] = {}  # sessions that a client ended, and that have no open turn left
    # Records of the own log that were read before their causes: logs have no common order.
    ended_early: set[str] = set()  # turns
    ready_early: dict[str, int] = {}  # turns, and when they became ready
    closed_early: dict[str, int] = {}  # sessions, and the sequence in TURNS up to which they are closed
    graded: dict[str, None] = {}  # turns that wait to be admitted, the newest last
    families: dict[str, list[str]] = {}  # open turns with the same prompt, by their common key
    holding: dict[str, int] = {}  # graded turns that wait for those, and since when by the server's clock
    on_way: UnderWay = msgspec.field(default_factory=UnderWay)
    ended_prompts: set[str] = set()  # whose end was read before their admission
    skipped: dict[str, int] = {}  # turns by reason
    purged: set[str] = set()  # data keys that were erased
    admitted: int = 0
    trained: int = 0  # newest step
    watched: Watched = msgspec.field(default_factory=Watched)
    late_feedback: int = 0  # of turns that were in a batch before, or have another end, or are another tenant's
