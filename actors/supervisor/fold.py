"""The fold of the supervisor: a pure function of messages, small however long a run is."""

from __future__ import annotations

from typing import Any

import msgspec

from actors.supervisor.trimmer_fold import RoomState, TrimmerFold, trimmer_inputs
from asyncrl.bus.fold import Fold, on
from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from topics.actors import (
    ACTOR_STARTED,
    ACTOR_STOPPED,
    RUN_OPENED,
    SCALE_REQUESTED,
    STOP_REQUESTED,
    ActorStarted,
    ActorStopped,
    FleetScaled,
    RunOpened,
    ScaleRequested,
    StopRequested,
)
from topics.batches import BATCH_TRAINED, BatchTrained
from topics.evals import EVAL_REQUESTED, EVAL_SCORED, EvalRequested, EvalScored
from topics.roles import SCALABLE
from topics.topic import ACTORS, BATCHES, TRAINING, Stream, Topic
from topics.weights import TRAINING_FINISHED, TrainingFinished
from topics.wire import Message


def supervisor_inputs(config: Config) -> dict[Stream, list[Topic[Any]]]:
    """The logs that the supervisor folds besides its own, with those that its trimmer needs."""
    inputs: dict[Stream, list[Topic[Any]]] = {
        ACTORS: [RUN_OPENED, SCALE_REQUESTED, STOP_REQUESTED, ACTOR_STARTED, ACTOR_STOPPED],
        TRAINING: [BATCH_TRAINED, TRAINING_FINISHED, EVAL_REQUESTED],
        BATCHES: [EVAL_SCORED],
    }
    for stream, topics in trimmer_inputs(config).items():
        inputs.setdefault(stream, []).extend(topics)
    return inputs


class SupervisorState(msgspec.Struct):
    """The whole state as plain data, which snapshots hold. A field whose meaning changes gets another name."""

    room: RoomState
    wanted: dict[str, int] = {}
    asked: dict[str, int] = {}  # numbers of processes that were asked for and are not wanted yet
    stopping: str = ""
    finished_at: int | None = None  # step at which training was reported finished
    trained: int = 0  # batches reported trained
    reasons: dict[str, str] = {}  # last output of each actor
    pids: dict[str, int] = {}  # process that played each actor last
    left: set[str] = set()  # actors that have published their end
    evals_open: set[str] = set()
    scored_early: set[str] = set()  # results read before the request they answer: logs have no common order


class SupervisorFold(Fold):
    """Requests of operators, whether the run has ended, and which tokens, weights and checkpoints are needed."""

    def __init__(self, config: Config) -> None:
        self.room = TrimmerFold(config)
        self._state = SupervisorState(self.room.state)
        self._steps = config.learner.steps

    @property
    def state(self) -> SupervisorState:
        """All that was folded, but for what the payload stream itself holds."""
        return self._state

    @state.setter
    def state(self, state: SupervisorState) -> None:
        self._state, self.room.state = state, state.room

    @property
    def finished(self) -> bool:
        """Return whether training is over: a run that was made longer has finished before and goes on."""
        return self._state.finished_at is not None and self._state.finished_at >= self._steps

    def apply(self, topic: Topic[Message], message: Message | None, record: Record) -> None:
        """Fold one message in."""
        self.room.apply(topic, message, record)
        super().apply(topic, message, record)

    @on(FleetScaled)
    def _on_scaled(self, scaled: FleetScaled, _record: Record) -> None:
        self._state.wanted.update(scaled.wanted)

    @on(ScaleRequested)
    def _on_request(self, request: ScaleRequested, _record: Record) -> None:
        self._state.asked.update({role: count for role, count in request.wanted.items() if role in SCALABLE})

    @on(RunOpened)
    def _on_opened(self, _opened: RunOpened, _record: Record) -> None:
        self._state.stopping = ""  # requests from before the run was opened again have been served

    @on(StopRequested)
    def _on_stop(self, request: StopRequested, _record: Record) -> None:
        self._state.stopping = request.reason or "asked to stop"

    @on(BatchTrained)
    def _on_trained(self, _trained: BatchTrained, _record: Record) -> None:
        self._state.trained += 1

    @on(TrainingFinished)
    def _on_finished(self, finished: TrainingFinished, _record: Record) -> None:
        self._state.finished_at = finished.step

    @on(ActorStarted)
    def _on_started(self, started: ActorStarted, _record: Record) -> None:
        self._state.pids[started.actor_id] = started.pid
        self._state.left.discard(started.actor_id)

    @on(ActorStopped)
    def _on_stopped(self, stopped: ActorStopped, _record: Record) -> None:
        self._state.left.add(stopped.actor_id)
        if stopped.reason:
            self._state.reasons[stopped.actor_id] = stopped.reason

    @on(EvalRequested)
    def _on_requested(self, request: EvalRequested, _record: Record) -> None:
        self._on_eval(request.eval_id, self._state.evals_open, self._state.scored_early)

    @on(EvalScored)
    def _on_scored(self, scored: EvalScored, _record: Record) -> None:
        self._on_eval(scored.eval_id, self._state.scored_early, self._state.evals_open)

    def _on_eval(self, name: str, here: set[str], there: set[str]) -> None:
        """The second of the two ends an evaluation."""
        if name in there:
            there.discard(name)
        else:
            here.add(name)
