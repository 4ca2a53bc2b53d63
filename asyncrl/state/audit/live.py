"""Turns of live traffic in an audit: each is admitted once, and trained tokens are those of the engines."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import xxhash

from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.live.rows import live_rows
from asyncrl.state.audit.opening import Opening
from asyncrl.state.audit.violations import Kind, Violations
from topics.batches import BatchPacked
from topics.ids import LIVE, letter_of, number_of, trajectory_name
from topics.prompts import PromptIssued, PromptIssuedHeaders
from topics.trajectories import Segment, TrajectoryGenerated, TrajectoryGeneratedHeaders
from topics.turns import (
    FeedbackGivenHeaders,
    SealedHeaders,
    Sibling,
    TurnAdmitted,
    TurnFinished,
    TurnFinishedHeaders,
    TurnJudgedHeaders,
    TurnOverruled,
    TurnShadowed,
    TurnSkipped,
    TurnStarted,
    TurnStartedHeaders,
)
from topics.values import checked_logprobs

_EXPECTED = "what the gateway stored of the turn"


class _Turn(NamedTuple):
    """Digests of a turn: its tokens would fill the memory of an audit."""

    prompt: int  # tokens
    reply: int
    tokens: str  # of prompt and reply
    logprobs: str  # of the reply
    versions: str


class _Grade(NamedTuple):
    """A grade of a turn by a judge, or by its user."""

    time_ns: int  # server's clock
    reward: float


class Live(Fold):
    """Compares live turns with their ends, and their trajectories with the tokens of the turns.

    The turns are read first. Their headers are enough for all but the tokens.
    """

    def __init__(self, opening: Opening, violations: Violations) -> None:
        self._opening, self._violations = opening, violations
        self._begun: dict[str, TurnStarted] = {}
        self._histories: dict[str, Any] = {}  # unfinished digest of prompt and reply, by turn
        self._ahead: dict[str, list[tuple[TurnStarted, TurnFinished]]] = {}  # stored before the end of their parent
        self._turns: dict[str, _Turn] = {}
        self._shadows: dict[str, str] = {}  # digests of shadow answers, by turn
        self._grades: dict[tuple[str, str], list[_Grade]] = {}  # by turn, and the judge or the tenant that spoke
        self._admitted: list[TurnAdmitted] = []
        self._ends: dict[str, str] = {}  # "admitted" or "skipped", by turn
        self._early_skips: dict[str, str] = {}  # reasons that the beginning of a turn gives, by turn
        self._late_skips: dict[str, str] = {}  # reasons that its end gives, or "", by turn that has ended
        self._wanted: dict[str, list[float]] = {}  # rewards by users, by trajectory
        self._siblings: dict[str, str] = {}  # what turns with one prompt have in common, by turn

    def _on_started(self, message: TurnStarted | TurnStartedHeaders, _record: Record) -> None:
        self._siblings[message.turn_id] = message.siblings
        if message.skip is not None:
            self._early_skips[message.turn_id] = message.skip
        if isinstance(message, TurnStarted):
            self._begun[message.turn_id] = message

    def _on_finished(self, message: TurnFinished | TurnFinishedHeaders, _record: Record) -> None:
        headers = TurnFinishedHeaders.of(message) if isinstance(message, TurnFinished) else message
        self._late_skips.setdefault(headers.turn_id, headers.skip or "")
        if isinstance(message, TurnFinished):
            self._add_tokens(message)

    def _add_tokens(self, message: TurnFinished) -> None:
        started = self._begun.pop(message.turn_id, None)
        ended = [(started, message)] if started is not None else []
        while ended:
            turn, end = ended.pop()
            if turn.parent and turn.parent not in self._histories:  # a gateway stored its end late
                self._ahead.setdefault(turn.parent, []).append((turn, end))
                continue
            self._know(turn, end)
            ended += self._ahead.pop(turn.turn_id, [])

    def _know(self, started: TurnStarted, finished: TurnFinished) -> None:
        """Keep the digests of a turn whose history is known."""
        digest = self._histories[started.parent].copy() if started.parent else xxhash.xxh3_64()
        digest.update(started.tokens.tobytes() + finished.tokens.tobytes())
        self._histories[started.turn_id] = digest
        self._turns[started.turn_id] = _Turn(
            started.known + len(started.tokens),
            len(finished.tokens),
            digest.hexdigest(),
            _digest(checked_logprobs(finished.logprobs)),  # as a `Segment` reads them
            _digest(finished.versions),
        )

    def _on_shadowed(self, message: TurnShadowed | SealedHeaders, _record: Record) -> None:
        if isinstance(message, TurnShadowed):
            self._shadows[message.turn_id] = _digest(message.tokens)

    def _on_judged(self, headers: TurnJudgedHeaders, record: Record) -> None:
        if headers.reward is not None:
            self._grades.setdefault((headers.turn_id, ""), []).append(_Grade(record.time_ns, headers.reward))

    def _on_feedback(self, headers: FeedbackGivenHeaders, record: Record) -> None:
        grade = _Grade(record.time_ns, headers.score)
        self._grades.setdefault((headers.turn_id, headers.tenant), []).append(grade)

    def _check_grade(self, turn: str, tenant: str, reward: float, record: Record) -> None:
        """A reward is one that a judge (tenant "") or the turn's own tenant gave before, within its bound."""
        most = self._opening.settings_at(record.time_ns).live.safety.reward
        grades = [(time_ns, min(most, max(-most, grade))) for time_ns, grade in self._grades.get((turn, tenant), [])]
        times = [time_ns for time_ns, given in grades if given == reward]
        by = f"feedback of {tenant}" if tenant else "a judge"
        found = f"the reward {reward:g} by {by}"
        if not times:
            given = [given for _, given in grades]
            self._violations.add("wrong rewards", turn, found, f"one of {given}" if given else f"a grade by {by}")
        elif (late_s := (min(times) - record.time_ns) / 1e9) > 0:
            self._violations.add("graded late", turn, f"{found}, given {late_s:,.3f} s later", "a grade before it")

    def _on_admitted(self, message: TurnAdmitted, record: Record) -> None:
        for turn in message.turns:
            self._end(turn.turn_id, "admitted")
            self._check_admission(turn.turn_id, record)
            self._check_grade(turn.turn_id, message.tenant if turn.by == "user" else "", turn.reward, record)
        if len({self._siblings.get(turn.turn_id) for turn in message.turns}) > 1:
            found = f"{[turn.turn_id for turn in message.turns]} as one group"
            self._violations.add("wrong row", message.turn_id, found, "replies to one prompt, at one temperature")
        self._admitted.append(message)

    def _on_skipped(self, message: TurnSkipped, _record: Record) -> None:
        self._end(message.turn_id, "skipped")

    def _end(self, turn: str, end: str) -> None:
        if (before := self._ends.setdefault(turn, "")) != "":
            kind: Kind = "admitted twice" if end == before == "admitted" else "ended twice"
            self._violations.add(kind, turn, f"{before}, then {end}", "one end for a turn")
        self._ends[turn] = end

    def _check_admission(self, turn: str, record: Record) -> None:
        """An admitted turn is stored, has ended, and may be trained."""
        if turn not in self._siblings or turn not in self._late_skips:
            found = "admitted, and its end is not stored" if turn in self._siblings else "admitted, and not stored"
            self._violations.add("unknown turn", turn, found, "a turn that the gateway stored")
            return
        early = self._early_skips.get(turn, "")
        allowed = self._opening.settings_at(record.time_ns).live.allow
        if skip := ("" if early in allowed else early) or self._late_skips[turn]:
            found = f"admitted, although the turn is marked {skip!r}"
            self._violations.add("not to be trained", turn, found, "a turn that may be trained")

    def _on_overruled(self, message: TurnOverruled, record: Record) -> None:
        admitted, turn = self._turn_of(message.prompt_id, message.member)
        if admitted is None or turn is None or turn.turn_id != message.turn_id:
            found, expected = f"{message.turn_id} is overruled", turn.turn_id if turn else "an admitted turn"
            self._violations.add("wrong rewards", message.prompt_id, found, expected)
        else:
            self._check_grade(message.turn_id, admitted.tenant, message.reward, record)
        self._wanted.setdefault(trajectory_name(message.prompt_id, message.member), []).append(message.reward)

    def _on_packed(self, message: BatchPacked, _record: Record) -> None:
        for group in message.groups:
            for member in group.members:
                wanted = self._wanted.get(member.trajectory_id, [])
                if member.overruled and member.reward not in wanted:
                    expected = f"one of {wanted}, as its user wants" if wanted else "the reward of its grade"
                    self._violations.add("wrong rewards", member.trajectory_id, f"{member.reward:g}", expected)

    def _on_issued(self, message: PromptIssued | PromptIssuedHeaders, _record: Record) -> None:
        if not isinstance(message, PromptIssued) or letter_of(message.prompt_id) != LIVE:
            return
        admitted, _ = self._turn_of(message.prompt_id, message.member)
        rows = live_rows(admitted) if admitted is not None else []
        expected = (rows if not message.member else [], len(rows), admitted.temperature if admitted else 0.0)
        if admitted is None or (message.rows, message.group_size, message.temperature) != expected:
            found = f"the rows {[row.metadata for row in message.rows]} of {message.group_size}"
            wanted = f"{[row.metadata for row in rows]}, as it was admitted"
            self._violations.add("wrong row", message.trajectory_id, found, wanted)

    def _on_generated(self, message: TrajectoryGenerated | TrajectoryGeneratedHeaders, _record: Record) -> None:
        if not isinstance(message, TrajectoryGenerated) or letter_of(message.prompt_id) != LIVE:
            return
        _, admitted = self._turn_of(message.prompt_id, message.member)
        turn = self._turns.get(admitted.turn_id) if admitted is not None else None
        if admitted is None or turn is None:
            found = f"the trajectory of {admitted.turn_id if admitted else 'no turn'}"
            self._violations.add("foreign tokens", message.trajectory_id, found, "a turn that is stored")
            return
        problem, shadow = _difference(message.segments, turn), self._shadows.get(admitted.turn_id)
        if problem and any(_digest(row.tokens[turn.prompt :]) == shadow for row in message.segments):
            problem = "the shadow answer, which is never trained"
        if not problem and (message.outcome is None or message.outcome.reward != admitted.reward):
            problem = f"the reward {message.outcome.reward if message.outcome else None}, not {admitted.reward}"
        if problem:
            self._violations.add("foreign tokens", message.trajectory_id, problem, f"{_EXPECTED} {admitted.turn_id}")

    def _turn_of(self, prompt_id: str, member: int) -> tuple[TurnAdmitted | None, Sibling | None]:
        """Return the group of a prompt, and its member; None if it was never admitted."""
        number = number_of(prompt_id)
        group = self._admitted[number] if number < len(self._admitted) else None
        turns = group.turns if group is not None else []
        return group, turns[member] if member < len(turns) else None


def _difference(segments: list[Segment], turn: _Turn) -> str:
    """Return what a trajectory has that its turn has not; "" for nothing."""
    if len(segments) != 1:
        return f"{len(segments)} rows"
    [row] = segments
    if len(row.tokens) != turn.prompt + turn.reply or _digest(row.tokens) != turn.tokens:
        return f"other ids ({len(row.tokens)} of them)"
    if row.mask[: turn.prompt].any() or not (row.mask[turn.prompt :] == 1).all():
        return "another mask"
    if _digest(row.logprobs[turn.prompt :]) != turn.logprobs:
        return "other log-probs"
    return "other versions" if _digest(row.versions[turn.prompt :]) != turn.versions else ""


def _digest(values: np.ndarray[Any, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(values.tobytes())
