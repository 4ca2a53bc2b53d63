"""The fold of the supervisor: a pure function of messages, small however long a run is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from actors.supervisor.trimmer_fold import RoomState, TrimmerFold
from asyncrl.bus.log import Record
from asyncrl.config.pools import lent_pools
from asyncrl.config.settings import Config
from topics.actors import (
    ActorLeaving,
    ActorStarted,
    ActorStopped,
    FleetScaled,
    RunOpened,
    ScaledBy,
    ScaleRequested,
    StopRequested,
)
from topics.alerts import AlertEnded, AlertRaised
from topics.batches import BatchTrained
from topics.engines import EngineAnnounced, EngineWithdrawn
from topics.evals import EvalRequested, EvalScored
from topics.promotions import CanaryEnded, PromotionRefused, PromotionRequested, WeightsCanaried, WeightsPromoted
from topics.roles import role_of
from topics.table import BUILT_IN, Tables
from topics.trajectories import TrajectoryGeneratedHeaders
from topics.turns import TurnAdmitted, TurnSkipped
from topics.weights import TrainingFinished, WeightsRefused


class Wish(msgspec.Struct):
    """The number of processes that a request names for one pool."""

    count: int
    at: int  # sequence of the request
    by: ScaledBy
    reason: str = ""
    after: int = 0  # sequence of the decision that the request rests on


class ScaleRequests(msgspec.Struct):
    """The newest wish for each pool, and how far they are answered.

    A wish of the rule, or of `asyncrl share`, counts only until a decision is taken after the one that it is based on.
    It therefore cannot undo a user's later request. It is stored separately, so it hides no wish of a user either.
    """

    asked: dict[str, Wish] = {}
    proposed: dict[str, Wish] = {}  # by the rule, or by weight
    answered: int = 0  # sequence of the newest request that a decision answers
    decided_at: int = 0  # sequence of the newest decision

    def ask(self, request: ScaleRequested, sequence: int, scalable: Sequence[str]) -> None:
        """Take in a request, about roles that are scalable."""
        wishes = self.proposed if request.by in ("autoscale", "share") else self.asked
        for pool, count in request.wanted.items():
            if role_of(pool) in scalable:
                wishes[pool] = Wish(count, sequence, request.by, request.reason, request.after)

    def answer(self, decision: FleetScaled, sequence: int) -> None:
        """Take in a decision."""
        self.answered, self.decided_at = max(self.answered, decision.request), sequence

    def decide(self, wanted: Mapping[str, int], most: Callable[[str], int]) -> FleetScaled | None:
        """Return the decision about the oldest open request, one of a user first; None if no request is open.

        Args:
            wanted: processes of each pool now; others are no pools of this run.
            most: processes that a pool may have.
        """
        valid = {pool: wish for pool, wish in self.proposed.items() if wish.after == self.decided_at}
        for wishes in (self.asked, valid):
            open_ = {pool: wish for pool, wish in wishes.items() if wish.at > self.answered}
            if open_:
                first = min(open_.values(), key=lambda wish: wish.at)
                counts = {pool: wish.count for pool, wish in open_.items() if wish.at == first.at and pool in wanted}
                counts = {pool: min(count, most(pool)) for pool, count in counts.items()}
                return FleetScaled(counts, by=first.by, reason=first.reason, request=first.at)
        return None


_WITHOUT_REPLY = ("gone", "failed", "empty", "lost", "purged")  # reasons of turns whose end is no work of anybody


class SupervisorState(RoomState, msgspec.Struct):
    """The whole state as plain data, which snapshots hold. A field whose meaning changes gets another name."""

    wanted: dict[str, int] = {}
    scaling: ScaleRequests = msgspec.field(default_factory=ScaleRequests)
    announced: list[str] = []  # engines that were announced during the run, and not withdrawn
    withdrawn: set[str] = set()  # engines that shall be left
    stopping: str = ""
    finished_at: int | None = None  # step at which training was reported finished
    trained: int = 0  # batches reported trained
    reasons: dict[str, str] = {}  # last output of each actor
    pids: dict[str, int] = {}  # process that played each actor last
    left: set[str] = set()  # actors that have published their end
    evals_open: set[str] = set()
    alerts: dict[str, int] = {}  # step of the newest change of each alert
    open_alerts: set[str] = set()
    rollbacks: dict[str, int] = {}  # that each alert asked for
    scored_early: set[str] = set()  # results read before the request they answer: logs have no common order


class SupervisorFold(TrimmerFold):
    """Requests of operators, whether the run has ended, and which tokens, weights and checkpoints are needed."""

    state: SupervisorState

    def __init__(
        self,
        config: Config,
        on_started: Callable[[str], None] = lambda _actor_id: None,
        on_leaving: Callable[[str, int], None] = lambda _actor_id, _pid: None,
        tables: Tables = BUILT_IN,
    ) -> None:
        super().__init__(config)
        self._announce_start = on_started  # called with the id of an actor whose process has published its start
        self._announce_leaving = on_leaving  # called with id and process of an actor that waits for its successor
        self.state = SupervisorState(self.state.asked_after)
        self._engines, self._lent = config.engine, lent_pools(config)
        self._scalable = tables.scalable
        self._steps = config.learner.steps
        self._weights = config.weights
        self.achieved = 0  # steps, tokens of trajectories, and whole replies that were stored, as often as read here

    @property
    def finished(self) -> bool:
        """Return whether training is over: a run that was extended has finished before, and continues."""
        return self.state.finished_at is not None and self.state.finished_at >= self._steps

    def _on_scaled(self, scaled: FleetScaled, record: Record) -> None:
        self.state.wanted.update(scaled.wanted)
        self.state.scaling.answer(scaled, record.sequence)

    def _on_scale_requested(self, request: ScaleRequested, record: Record) -> None:
        self.state.scaling.ask(request, record.sequence, self._scalable)

    def _on_announced(self, message: EngineAnnounced, _record: Record) -> None:
        message.check()
        self.state.announced = [*dict.fromkeys([*self.state.announced, message.engine_id])]
        self.state.withdrawn.discard(message.engine_id)

    def _on_withdrawn(self, message: EngineWithdrawn, _record: Record) -> None:
        self._engines.group_of(message.engine_id)  # raises ValueError for a name that is none
        self.state.announced = [name for name in self.state.announced if name != message.engine_id]
        self.state.withdrawn.add(message.engine_id)

    def _on_opened(self, _opened: RunOpened, record: Record) -> None:
        self.state.stopping = ""  # requests from before the run was opened again have been served
        if self._lent:  # other runs may have these by now
            none = ScaleRequested(dict.fromkeys(self._lent, 0), by="start")
            self.state.scaling.ask(none, record.sequence, self._scalable)

    def _on_stop(self, request: StopRequested, _record: Record) -> None:
        self.state.stopping = request.reason or "asked to stop"

    def _on_alert_raised(self, message: AlertRaised, _record: Record) -> None:
        self.state.alerts[message.alert] = message.step
        self.state.open_alerts.add(message.alert)
        if message.do == "rollback":
            self.state.rollbacks[message.alert] = self.state.rollbacks.get(message.alert, 0) + 1

    def _on_alert_ended(self, message: AlertEnded, _record: Record) -> None:
        self.state.alerts[message.alert] = message.step
        self.state.open_alerts.discard(message.alert)

    def _on_trained(self, trained: BatchTrained, _record: Record) -> None:
        self.state.trained += 1
        self.state.channel.divergence.trained(trained)
        self.achieved += 1

    def _on_stored(self, headers: TrajectoryGeneratedHeaders, record: Record) -> None:
        super()._on_stored(headers, record)
        self.achieved += 1

    def _on_finished(self, finished: TrainingFinished, _record: Record) -> None:
        self.state.finished_at = finished.step

    def _on_started(self, started: ActorStarted, _record: Record) -> None:
        self.state.pids[started.actor_id] = started.pid
        self.state.left.discard(started.actor_id)
        self.state.reasons.pop(started.actor_id, None)  # why it waited, or how the one before had ended
        self._announce_start(started.actor_id)

    def _on_leaving(self, leaving: ActorLeaving, _record: Record) -> None:
        self._announce_leaving(leaving.actor_id, leaving.pid)

    def _on_stopped(self, stopped: ActorStopped, _record: Record) -> None:
        if stopped.pid and self.state.pids.get(stopped.actor_id, stopped.pid) != stopped.pid:
            return  # the next process has started
        self.state.left.add(stopped.actor_id)
        if stopped.reason:
            self.state.reasons[stopped.actor_id] = stopped.reason

    def _on_promotion_requested(self, request: PromotionRequested, record: Record) -> None:
        self.state.channel.ask(request, record.sequence)

    def _on_promoted(self, message: WeightsPromoted, _record: Record) -> None:
        self.state.channel.promote(message, self._weights)

    def _on_canaried(self, message: WeightsCanaried, record: Record) -> None:
        self.state.channel.try_out(message, record.sequence)

    def _on_canary_ended(self, message: CanaryEnded, _record: Record) -> None:
        self.state.channel.end_canary(message)

    def _on_turn_admitted(self, admitted: TurnAdmitted, _record: Record) -> None:
        for turn in admitted.turns:
            self.state.channel.count(turn)
            self.achieved += 1

    def _on_turn_skipped(self, skipped: TurnSkipped, _record: Record) -> None:
        self.state.channel.count(skipped)
        self.achieved += skipped.reason not in _WITHOUT_REPLY

    def _on_promotion_refused(self, message: PromotionRefused, _record: Record) -> None:
        self.state.channel.answer(message.by, message.cause)

    def _on_weights_refused(self, message: WeightsRefused, _record: Record) -> None:
        self.state.channel.refuse(message)

    def _on_eval_requested(self, request: EvalRequested, _record: Record) -> None:
        if (self._weights.gate_metric or self._exact) and request.eval_id not in self.state.scored_early:
            self.state.channel.evaluated[request.eval_id] = request.version
        self._match_eval(request.eval_id, self.state.evals_open, self.state.scored_early)

    def _on_scored(self, scored: EvalScored, record: Record) -> None:
        super()._on_scored(scored, record)
        self.state.channel.score(scored, record.sequence, self._weights)
        self._match_eval(scored.eval_id, self.state.scored_early, self.state.evals_open)

    def _match_eval(self, name: str, here: set[str], there: set[str]) -> None:
        """The second of the two ends an evaluation."""
        if name in there:
            there.discard(name)
        else:
            here.add(name)
