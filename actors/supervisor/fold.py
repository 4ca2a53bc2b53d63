"""The fold of the supervisor: a pure function of messages, small however long a run is."""

from __future__ import annotations

from typing import Any

import msgspec

from actors.supervisor.trimmer_fold import RoomState, TrimmerFold, trimmer_inputs
from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from topics.actors import (
    ACTOR_STARTED,
    ACTOR_STOPPED,
    FLEET_SCALED,
    RUN_OPENED,
    SCALE_REQUESTED,
    STOP_REQUESTED,
)
from topics.batches import BATCH_TRAINED
from topics.evals import EVAL_REQUESTED, EVAL_SCORED
from topics.roles import SCALABLE
from topics.topic import ACTORS, EVALS, TRAINING, Stream, Topic
from topics.weights import TRAINING_FINISHED


def supervisor_inputs(config: Config) -> dict[Stream, list[Topic[Any]]]:
    """The logs that the supervisor folds besides its own, with those that its trimmer needs."""
    inputs: dict[Stream, list[Topic[Any]]] = {
        ACTORS: [RUN_OPENED, SCALE_REQUESTED, STOP_REQUESTED, ACTOR_STARTED, ACTOR_STOPPED],
        TRAINING: [BATCH_TRAINED, TRAINING_FINISHED, EVAL_REQUESTED],
        EVALS: [EVAL_SCORED],
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


class SupervisorFold:
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

    def apply(self, topic: Topic[Any], message: Any, record: Record) -> None:
        """Fold one message in."""
        self.room.apply(topic, message, record)
        state = self._state
        if topic is FLEET_SCALED:
            state.wanted.update(message.wanted)
        elif topic is SCALE_REQUESTED:
            state.asked.update({role: count for role, count in message.wanted.items() if role in SCALABLE})
        elif topic is RUN_OPENED:
            state.stopping = ""  # requests from before the run was opened again have been served
        elif topic is STOP_REQUESTED:
            state.stopping = message.reason or "asked to stop"
        elif topic is BATCH_TRAINED:
            state.trained += 1
        elif topic is TRAINING_FINISHED:
            state.finished_at = message.step
        elif topic is ACTOR_STARTED:
            state.pids[message.actor_id] = message.pid
            state.left.discard(message.actor_id)
        elif topic is ACTOR_STOPPED:
            state.left.add(message.actor_id)
            if message.reason:
                state.reasons[message.actor_id] = message.reason
        elif topic is EVAL_REQUESTED or topic is EVAL_SCORED:
            self._on_eval(topic, message.eval_id)

    def _on_eval(self, topic: Topic[Any], name: str) -> None:
        """The second of the two ends an evaluation."""
        here, there = self._state.evals_open, self._state.scored_early
        if topic is EVAL_SCORED:
            here, there = there, here
        if name in there:
            there.discard(name)
        else:
            here.add(name)
