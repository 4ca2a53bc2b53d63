"""The turns of each session, which feedback on a session applies to."""

from __future__ import annotations

from collections import OrderedDict

from topics.turns import TurnFinished, TurnStarted

_MOST_TURNS = 65_536  # of all sessions


class SessionTurns:
    """A fold of turns: those that may be trained, by session, the newest sessions."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, dict[str, str]] = OrderedDict()  # data keys by turn, by session
        self._count = 0

    def take(self, fact: TurnStarted | TurnFinished) -> None:
        """Fold in the begin or the end of a turn, without side turns, private ones and those with no whole reply."""
        turns = self._turns.get(fact.session)
        if isinstance(fact, TurnFinished):
            if turns is not None and fact.finish not in ("stop", "length"):
                self._count -= turns.pop(fact.turn_id, None) is not None
                if not turns:
                    del self._turns[fact.session]
            return
        if fact.skip == "side" or not fact.secret:
            return
        if turns is None:
            turns = self._turns[fact.session] = {}
        self._turns.move_to_end(fact.session)
        self._count += fact.turn_id not in turns
        turns[fact.turn_id] = fact.secret
        while self._count > _MOST_TURNS and len(self._turns) > 1:
            self._count -= len(self._turns.popitem(last=False)[1])

    def of(self, session: str) -> list[str]:
        """Return the turns of a session, in their order."""
        return [*self._turns.get(session, ())]

    def purge(self, secrets: set[str]) -> None:
        """Forget the turns that are sealed under these data keys."""
        for session, turns in [*self._turns.items()]:
            kept = {turn: secret for turn, secret in turns.items() if secret not in secrets}
            self._count -= len(turns) - len(kept)
            if kept:
                self._turns[session] = kept
            else:
                del self._turns[session]
