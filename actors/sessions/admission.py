"""What becomes of graded turns, pure: which are trained, as groups of those with one prompt, and which end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from actors.sessions.state import OpenTurn, SessionsState
from asyncrl.algorithms.lag import open_groups
from asyncrl.config.live_settings import LiveSettings
from asyncrl.config.settings import BufferSettings
from topics.turns import Sibling, SkipReason, TurnAdmitted, TurnSkipped


class Room(NamedTuple):
    """Numbers of turns that may be on their way."""

    under_way: int  # admitted, and neither in a batch nor at another end
    waiting: int  # graded, and not admitted
    max_lag: int  # of a token, in versions

    @classmethod
    def of(cls, buffer: BufferSettings) -> Room:
        """Two batches are on their way, of which one may be packed while the other comes; as many wait as ever could
        be trained of one version."""
        groups, max_lag = buffer.batch_groups, buffer.max_lag
        return cls(2 * groups, open_groups(groups, max_lag), max_lag)


class Admission:
    """The rules of admission; the state is that of the fold."""

    def __init__(self, settings: LiveSettings, room: Room) -> None:
        self._safety, self._room = settings.safety, room
        self._siblings_ns = int(settings.siblings_s * 1e9)

    def waits_until(self, since_ns: int) -> int:
        """Return when a turn that was graded then waits for no siblings any more."""
        return since_ns + self._siblings_ns

    def decide(self, state: SessionsState, now_ns: int) -> list[TurnAdmitted | TurnSkipped]:
        """Return what becomes of graded turns: the newest are admitted as far as there is room, and those end that are
        not to be trained any more, and the oldest of more than may wait."""
        for name, since_ns in list(state.holding.items()):
            if self.waits_until(since_ns) <= now_ns or not _awaits(state, name):
                del state.holding[name]
        graded = [name for name in state.graded if state.turns[name].skip is None]  # others are due to end
        refused = {name: why for name in graded if (why := self._refusal(state, state.turns[name])) is not None}
        groups = _grouped(state, (name for name in reversed(graded) if name not in refused))
        ready = [names for names in groups.values() if not all(name in state.holding for name in names)]
        free = max(0, self._room.under_way - len(state.on_way.groups))
        surplus = [name for names in ready[free + self._room.waiting :] for name in names]
        return [
            *(self.skipped(state, name, why) for name, why in refused.items()),
            *(self._admitted(state, names[::-1]) for names in ready[:free]),
            *(self.skipped(state, name, "surplus") for name in reversed(surplus)),
        ]

    def _refusal(self, state: SessionsState, turn: OpenTurn) -> SkipReason | None:
        """Return why a graded turn is not trained; None if it is."""
        if turn.newest < state.trained - self._room.max_lag:  # all of its tokens are too old to be trained
            return "behind"
        most = self._safety.repeats
        return "repeat" if most and state.watched.sames.get(turn.same, 0) >= most else None

    def _admitted(self, state: SessionsState, names: list[str]) -> TurnAdmitted:
        first, *siblings = [self._member(name, state.turns[name]) for name in names]
        turns = [state.turns[name] for name in names]
        secrets = dict.fromkeys(secret for turn in turns for secret in turn.secrets.split(",") if secret)
        return TurnAdmitted(
            turn_id=first.turn_id,
            session=first.session,
            tenant=turns[0].tenant,
            reward=first.reward,
            by=first.by,
            temperature=turns[0].temperature,
            secrets=",".join(secrets),
            trial=first.trial,
            canary=first.canary,
            version=first.version,
            shadow=first.shadow,
            siblings=siblings,
        )

    def _member(self, name: str, turn: OpenTurn) -> Sibling:
        verdict, reward = turn.verdict, self._reward(turn)
        assert verdict is not None and reward is not None
        trial = verdict.trial or turn.trial
        return Sibling(name, turn.session, reward, verdict.by, trial, turn.canary, turn.newest, verdict.shadow)

    def skipped(self, state: SessionsState, name: str, reason: SkipReason) -> TurnSkipped:
        """Return the end of a turn that is not trained."""
        turn = state.turns[name]
        skipped = TurnSkipped(turn_id=name, session=turn.session, reason=reason)
        skipped.trial, skipped.canary, skipped.reward = turn.trial, turn.canary, self._reward(turn)
        if turn.trial and reason == "garbage":
            # No judge sees garbage: without a reward, a canary that says nothing else would never be compared.
            skipped.reward = -self._safety.reward
        skipped.version = -1 if skipped.reward is None else turn.newest
        if turn.verdict is not None and turn.verdict.trial:
            skipped.trial, skipped.shadow = turn.verdict.trial, turn.verdict.shadow
        return skipped

    def _reward(self, turn: OpenTurn) -> float | None:
        """Return the reward of a turn within its bound; None if it has no grade."""
        verdict = turn.verdict
        return None if verdict is None or verdict.reward is None else self.bounded(verdict.reward)

    def bounded(self, reward: float) -> float:
        """Return a reward within `live.safety.reward`."""
        return min(self._safety.reward, max(-self._safety.reward, reward))


def _grouped(state: SessionsState, names: Iterable[str]) -> dict[str, list[str]]:
    """Return turns by their family, each in the given order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(state.turns[name].siblings or name, []).append(name)
    return groups


def _awaits(state: SessionsState, name: str) -> bool:
    """Return whether another turn with its prompt may still be graded."""
    others = state.families.get(state.turns[name].siblings, ())
    return any(other not in state.graded and _may_be_graded(state.turns[other]) for other in others)


def _may_be_graded(turn: OpenTurn) -> bool:
    return turn.skip is None and (turn.verdict is None or turn.verdict.reward is not None)
