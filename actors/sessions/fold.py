"""The fold of the keeper of sessions, a pure function of messages: what becomes of each turn, and of sessions.

A turn is ready once another continues it, or its session has ended; then judges may grade it. Graded turns wait until
few enough of those admitted before are on their way to a batch; then the newest is admitted to training. One that is
too old for the next batch ends, as does the oldest of too many. A turn that cannot be trained ends as soon as that is
known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from actors.sessions.admission import Admission, Room
from actors.sessions.state import OnWay, OpenSession, OpenTurn, SessionsState, Verdict
from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.config.live_settings import LiveSettings
from topics.batches import BatchPacked, BatchTrained
from topics.groups import GroupDropped
from topics.ids import LIVE, letter_of, member_of, prompt_name
from topics.secrets import PurgeRequested
from topics.turns import (
    FeedbackGivenHeaders,
    SessionClosed,
    SessionLeftHeaders,
    TurnAdmitted,
    TurnFinishedHeaders,
    TurnJudgedHeaders,
    TurnOverruled,
    TurnReady,
    TurnSkipped,
    TurnStartedHeaders,
)
from topics.wire import Message

_AT_ONCE = 256  # decisions of one append


class SessionsFold(Fold):
    """Turns that have no end, and sessions that are open."""

    def __init__(self, settings: LiveSettings, room: Room) -> None:
        self._admission = Admission(settings, room)
        self._learns, self._allowed = settings.fraction > 0, frozenset(settings.allow)
        self._idle_ns, self._judge_ns = int(settings.idle_s * 1e9), int(settings.judge_s * 1e9)
        self.state = SessionsState()

    def _on_started(self, headers: TurnStartedHeaders, record: Record) -> None:
        state, name, session, parent = self.state, headers.turn_id, headers.session, headers.parent
        skip = None if headers.skip in self._allowed else headers.skip
        entry = self._active(session, record)
        before = state.turns.get(parent)
        if before is not None and skip != "side" and headers.continues not in before.evidence:  # else said already
            before.evidence.append(name)
            state.due[parent] = None
        if name in state.ended_early:
            state.ended_early.discard(name)
            return
        secrets = ",".join(filter(None, (headers.secret, headers.older)))
        temperature = headers.temperature or 1.0  # log-probs of greedy tokens are at temperature 1
        turn = OpenTurn(session, headers.tenant, temperature, skip=skip, secrets=secrets)
        state.turns[name], turn.siblings = turn, headers.siblings
        if turn.siblings:
            state.families.setdefault(turn.siblings, []).append(name)
        self._purge_if_gone(name)
        if name in state.ready_early:
            state.waiting[name] = state.ready_early.pop(name)
        elif entry is not None:
            entry.left = False  # the client continues the session
            entry.turns.add(name)

    def _on_finished(self, headers: TurnFinishedHeaders, record: Record) -> None:
        name, turn = headers.turn_id, self.state.turns.get(headers.turn_id)
        self._active(headers.session, record)
        if turn is None or turn.finished:
            return
        turn.finished = True
        turn.newest, turn.same = headers.newest, headers.same
        turn.trial, turn.canary = headers.trial, headers.canary
        if turn.skip is None and headers.skip in (None, "garbage"):
            self.state.watched.reply(headers.length, headers.marked.split(","))
        turn.skip = turn.skip or headers.skip
        self._grade(name, turn, record)

    def _on_left(self, headers: SessionLeftHeaders, record: Record) -> None:
        name = headers.session_id
        if name not in self.state.sessions and name not in self.state.closed_early:
            return  # it ended before, or never was
        session = self._active(name, record)
        if session is not None:
            session.left = True
            self.state.due |= dict.fromkeys(session.turns)
            if not session.turns:
                self.state.emptied[name] = None

    def _on_judged(self, headers: TurnJudgedHeaders, record: Record) -> None:
        name, reward, turn = headers.turn_id, headers.reward, self.state.turns.get(headers.turn_id)
        if turn is not None and headers.purged:
            turn.skip, self.state.due[name] = "purged", None
            return
        known = turn or self.state.on_way.of(name)  # its user may have spoken first, and then it may be admitted
        if known is not None and reward is not None:
            self.state.watched.agreement.judge(f"{known.tenant} {name}", reward)
        if turn is not None and turn.verdict is None:  # a judge that came back grades again: the first grade counts
            turn.verdict = Verdict("judge", reward)
            if headers.shadow is not None:
                turn.verdict.shadow, turn.verdict.trial = self._admission.bounded(headers.shadow), headers.trial
            self._grade(name, turn, record)

    def _on_purge(self, purge: PurgeRequested, _record: Record) -> None:
        self.state.purged.update(purge.secrets)
        for name in self.state.turns:
            self._purge_if_gone(name)

    def _purge_if_gone(self, name: str) -> None:
        turn = self.state.turns[name]
        if not self.state.purged.isdisjoint(turn.secrets.split(",")):
            turn.skip, self.state.due[name] = "purged", None

    def _on_feedback(self, headers: FeedbackGivenHeaders, record: Record) -> None:
        name, tenant, score = headers.turn_id, headers.tenant, headers.score
        turn, on_way = self.state.turns.get(name), self.state.on_way
        admitted = on_way.of(name)
        self.state.watched.agreement.user(f"{tenant} {name}", score)
        if turn is not None and turn.tenant == tenant:
            turn.verdict = Verdict("user", score)
            self._grade(name, turn, record)
        elif admitted is not None and admitted.tenant == tenant:
            on_way.want(admitted, self._admission.bounded(score))
        else:
            self.state.late_feedback += 1

    def _grade(self, name: str, turn: OpenTurn, record: Record) -> None:
        """Let a turn wait for its admission once it has ended and has a grade; nothing else is awaited of it then."""
        state = self.state
        state.due[name] = None
        graded = turn.verdict is not None and turn.verdict.reward is not None
        if graded and turn.finished and turn.skip is None and self._learns:
            state.graded.setdefault(name)
            if turn.siblings:
                state.holding.setdefault(name, record.time_ns)
            state.waiting.pop(name, None)
            self._settle(name, turn)

    def _on_ready(self, ready: TurnReady, record: Record) -> None:
        turn = self.state.turns.get(ready.turn_id)
        if turn is None:
            self.state.ready_early[ready.turn_id] = record.time_ns
            return
        if ready.turn_id not in self.state.graded:
            self.state.waiting[ready.turn_id] = record.time_ns
        self._settle(ready.turn_id, turn)

    def _on_admitted(self, admitted: TurnAdmitted, _record: Record) -> None:
        state, bounded = self.state, self._admission.bounded
        prompt, known = prompt_name(LIVE, state.admitted), prompt_name(LIVE, state.admitted) in state.ended_prompts
        state.admitted += 1
        state.ended_prompts.discard(prompt)
        on_way = []
        for member in admitted.turns:
            turn = state.turns.get(member.turn_id)
            verdict = turn.verdict if turn is not None else None
            graded = verdict.reward if verdict is not None else None
            by_user = graded if verdict is not None and verdict.by == "user" else None
            wanted = member.reward if by_user is None else by_user
            on_way.append(OnWay(member.turn_id, admitted.tenant, member.reward, bounded(wanted)))
            if turn is not None:
                state.watched.admit(turn.same)
                state.watched.clipped += graded is not None and bounded(graded) != graded
            self._end(member.turn_id)
        if not known:
            state.on_way.admit(prompt, on_way)

    def _on_trained(self, trained: BatchTrained, _record: Record) -> None:
        self.state.trained = trained.step  # less than before if the run resumes from an older checkpoint

    def _on_packed(self, packed: BatchPacked, _record: Record) -> None:
        for group in packed.groups:
            self._prompt_ended(group.prompt_id, {member_of(one.trajectory_id): one.reward for one in group.members})

    def _on_overruled(self, overruled: TurnOverruled, _record: Record) -> None:
        self.state.on_way.overrule(overruled.turn_id, overruled.reward)

    def _on_dropped(self, dropped: GroupDropped, _record: Record) -> None:
        self._prompt_ended(dropped.prompt_id, {})

    def _prompt_ended(self, prompt_id: str, trained: Mapping[int, float]) -> None:
        if letter_of(prompt_id) == LIVE and not self.state.on_way.end(prompt_id, trained):
            self.state.ended_prompts.add(prompt_id)

    def _on_skipped(self, skipped: TurnSkipped, _record: Record) -> None:
        self.state.skipped[skipped.reason] = self.state.skipped.get(skipped.reason, 0) + 1
        self._end(skipped.turn_id)

    def _on_closed(self, closed: SessionClosed, _record: Record) -> None:
        session = self.state.sessions.get(closed.session_id)
        if session is not None and session.newest <= closed.until:
            del self.state.sessions[closed.session_id]
        if session is None or session.newest < closed.until:
            self.state.closed_early[closed.session_id] = closed.until

    def _active(self, name: str, record: Record) -> OpenSession | None:
        """Note that something came in a session; None where the own log says that it was closed after that."""
        state, until = self.state, self.state.closed_early.get(name, 0)
        if until and record.sequence >= until:
            del state.closed_early[name]
        if record.sequence <= until:
            return None
        session = state.sessions.pop(name, None) or OpenSession(0, 0)
        session.newest, session.newest_ns = record.sequence, record.time_ns
        state.sessions[name] = session
        return session

    def _settle(self, name: str, turn: OpenTurn) -> None:
        """Take a turn from those that its session waits for."""
        session = self.state.sessions.get(turn.session)
        if session is not None:
            session.turns.discard(name)
            if session.left and not session.turns:
                self.state.emptied[turn.session] = None

    def _end(self, name: str) -> None:
        turn = self.state.turns.pop(name, None)
        self.state.due.pop(name, None)
        self.state.graded.pop(name, None)
        self.state.holding.pop(name, None)
        if turn is None:
            self.state.ready_early.pop(name, None)
            self.state.ended_early.add(name)
            return
        self.state.waiting.pop(name, None)
        if turn.siblings:
            family = self.state.families[turn.siblings]
            family.remove(name)
            if not family:
                del self.state.families[turn.siblings]
        self._settle(name, turn)

    def decide(self, now_s: float) -> list[Message]:
        """Return the messages to append at this moment of the server's clock."""
        now_ns = int(now_s * 1e9)
        self._set_back(now_ns)
        return list(islice(self._decisions(now_ns), _AT_ONCE))

    def _set_back(self, now_ns: int) -> None:
        """Replace times after this moment by this moment. The clock was ahead: the entries with those times, and all
        later ones, would wait until the clock reaches them."""
        state = self.state
        if any(session.newest_ns > now_ns for session in islice(state.sessions.values(), 1)):
            for session in state.sessions.values():
                session.newest_ns = min(session.newest_ns, now_ns)
        for times in (state.waiting, state.holding):
            if any(at_ns > now_ns for at_ns in islice(times.values(), 1)):
                times.update({name: min(at_ns, now_ns) for name, at_ns in times.items()})

    def next_deadline(self) -> float | None:
        """Return the moment of the server's clock, in seconds, at which time alone decides something."""
        moments = [session.newest_ns + self._idle_ns for session in islice(self.state.sessions.values(), 1)]
        moments += [ready_ns + self._judge_ns for ready_ns in islice(self.state.waiting.values(), 1)]
        moments += [self._admission.waits_until(since_ns) for since_ns in self.state.holding.values()]
        return min(moments) / 1e9 if moments else None

    def _decisions(self, now_ns: int) -> Iterator[Message]:
        state = self.state
        decided: set[str] = set()
        for name in list(state.due):
            decision = self._of_turn(name)
            if decision is None:
                del state.due[name]
                continue
            decided.add(name)
            yield decision
        for name in state.on_way.asked:
            prompt, member = state.on_way.places[name]
            wanted = state.on_way.groups[prompt][member].wanted
            yield TurnOverruled(turn_id=name, prompt_id=prompt, reward=wanted, member=member)
        for ended in self._admission.decide(state, now_ns):
            decided |= {turn.turn_id for turn in ended.turns} if isinstance(ended, TurnAdmitted) else {ended.turn_id}
            yield ended
        for name, ready_ns in state.waiting.items():
            if ready_ns + self._judge_ns > now_ns:
                break
            if name not in decided:
                decided.add(name)
                yield self._admission.skipped(state, name, "unjudged")
        yield from self._closings(now_ns, decided)

    def _closings(self, now_ns: int, decided: set[str]) -> Iterator[Message]:
        """Return the ends of sessions, and before them what becomes of the turns that they leave."""
        state = self.state
        for name, session in state.sessions.items():
            if session.newest_ns + self._idle_ns > now_ns:
                break
            for turn in session.turns - decided:
                yield self._ready(turn) if state.turns[turn].finished else self._admission.skipped(state, turn, "lost")
            if not session.turns:
                yield SessionClosed(session_id=name, reason="idle", until=session.newest)
        for name in list(state.emptied):
            found = state.sessions.get(name)
            if found is None or not found.left or found.turns:
                del state.emptied[name]
            elif found.newest_ns + self._idle_ns > now_ns:  # else it was closed above
                yield SessionClosed(session_id=name, reason="left", until=found.newest)

    def _of_turn(self, name: str) -> Message | None:
        """Return the decision about a turn; None if there is no decision yet or any more."""
        turn = self.state.turns.get(name)
        if turn is None or not (turn.finished or turn.skip == "purged"):
            return None
        if turn.skip is not None:
            return self._admission.skipped(self.state, name, turn.skip)
        if turn.verdict is not None:
            if turn.verdict.reward is None:
                return self._admission.skipped(self.state, name, "ungraded")
            return None if self._learns else self._admission.skipped(self.state, name, "off")
        session = self.state.sessions.get(turn.session)
        over = bool(turn.evidence) or (session is not None and session.left)
        return self._ready(name) if over and name not in self.state.waiting else None

    def _ready(self, name: str) -> TurnReady:
        turn = self.state.turns[name]
        return TurnReady(turn_id=name, session=turn.session, tenant=turn.tenant, evidence=turn.evidence)
