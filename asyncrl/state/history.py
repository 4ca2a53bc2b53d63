"""The history of one trajectory, from the logs."""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.bus.connection import Bus
from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from asyncrl.bus.merged_reader import read_log
from asyncrl.bus.publish import BY
from asyncrl.run.connect import RunNotFound
from asyncrl.state.records import reward_text
from topics.actors import RunOpened
from topics.batches import BatchPacked, BatchTrained
from topics.evals import EvalScored
from topics.groups import GroupDropped
from topics.ids import prompt_of
from topics.prompts import PromptIssued, PromptIssuedHeaders
from topics.topic import ACTORS, BATCHES, GRADES, PROMPTS, TRAINING, TRAJECTORIES
from topics.trajectories import (
    ProgressStored,
    TrajectoryDropped,
    TrajectoryFailed,
    TrajectoryGenerated,
    TrajectoryGeneratedHeaders,
    TrajectoryGraded,
    TrajectoryProgressed,
    TrajectoryProgressedHeaders,
)
from topics.wire import Message


class HistoryEvent(NamedTuple):
    """One message about a trajectory."""

    time_ns: int  # server's clock
    stream: str
    sequence: int
    what: str  # "generated"
    about: str


class TrajectoryHistory(Fold):
    """Collects the messages about one trajectory or its group; the batches are read before their trained steps."""

    def __init__(self, trajectory_id: str) -> None:
        self.trajectory_id = trajectory_id
        self.began_ns = 0  # when the run was opened
        self.logs: set[str] = set()  # progress logs with entries of it
        self.result = 0  # sequence of its newest result
        self._events: list[HistoryEvent] = []
        self._steps: set[int] = set()  # batches that hold it

    def events(self) -> list[HistoryEvent]:
        """All of it in order of time."""
        return sorted(self._events)

    @property
    def ended(self) -> bool:
        """Return whether a batch or a score holds it, or it was dropped."""
        return any(event.what in ("packed", "dropped", "scored") for event in self._events)

    @property
    def graded(self) -> bool:
        """Return whether it has a grade, and so had a result."""
        return any(event.what == "graded" for event in self._events)

    def refuse(self, record: Record, error: Exception) -> None:
        self._add(record, str(error), "unreadable")

    def _add(self, record: Record, about: str, what: str = "") -> None:
        by = f"by {record.headers[BY]}: " if BY in record.headers else ""
        what = what or record.subject.split(".")[3]
        self._events.append(HistoryEvent(record.time_ns, record.stream.name, record.sequence, what, by + about))

    def _on_opened(self, _: RunOpened, record: Record) -> None:
        self.began_ns = self.began_ns or record.time_ns

    def _on_issued(self, headers: PromptIssuedHeaders, record: Record) -> None:
        again = f", the row of {headers.origin} again" if headers.origin else ""
        group = f"{headers.stage}, group of {headers.group_size}"
        self._add(record, f"attempt {headers.attempt}, {group}, for version {headers.min_version} or newer{again}")

    def _on_progressed(self, headers: TrajectoryProgressedHeaders, record: Record) -> None:
        self.logs.add(headers.log)
        at = f"continued at {headers.offset:,} tokens" if headers.offset else "from its start"
        self._add(record, f"{_attempt_text(headers.attempt, headers.delivery)}, {at}, stored in log {headers.log}")

    def _on_stored(self, message: ProgressStored, record: Record) -> None:
        found = [
            f"{_attempt_text(entry.attempt, entry.delivery)}, {entry.offset:,} tokens so far"
            for entry in message.entries
            if entry.trajectory_id == self.trajectory_id
        ]
        if found:
            self._add(record, "; ".join(found))

    def _on_generated(self, headers: TrajectoryGeneratedHeaders, record: Record) -> None:
        self.result = record.sequence
        counts = [count.split(":") for count in headers.by_version.split(",") if count]
        tokens = ", ".join(
            f"{int(tokens):,} tokens " + ("of a teacher" if version == "-1" else f"by version {version}")
            for version, tokens in counts
        )
        self._add(record, f"{_attempt_text(headers.attempt, headers.delivery)}, {tokens or 'no trainable token'}")

    def _on_graded(self, message: TrajectoryGraded, record: Record) -> None:
        of = f"for message {message.payload.sequence} of TRAJECTORIES"
        given = reward_text(message.reward, message.turn_rewards)
        self._add(record, f"{_attempt_text(message.attempt, message.delivery)}, {given}, {of}")

    def _on_failed(self, message: TrajectoryFailed, record: Record) -> None:
        who = "reward" if message.reason == "reward" else "rollout"
        about = f"claimed by a {who} worker, {message.reason}: {message.detail}"
        self._add(record, f"{_attempt_text(message.attempt, message.delivery)}, {about}")

    def _on_dropped(self, message: TrajectoryDropped, record: Record) -> None:
        lag = f", lag {message.lag}" if message.reason == "lag" else ""
        detail = f": {message.detail}" if message.detail else ""
        self._add(record, f"attempt {message.attempt}, {message.reason}{lag}{detail}")

    def _on_group_dropped(self, message: GroupDropped, record: Record) -> None:
        self._add(record, f"with its group, {message.reason}")

    def _on_packed(self, message: BatchPacked, record: Record) -> None:
        masked = message.min_version > 0 and message.stage == "rl"
        rule = f"; tokens older than version {message.min_version} are masked" if masked else ""
        for group in message.groups:
            for member in [one for one in group.members if one.trajectory_id == self.trajectory_id]:
                self._steps.add(message.step)
                where = f"batch {message.step}, attempt {member.attempt}, one of {len(group.members)} of its group"
                given = reward_text(member.reward, member.turn_rewards)
                self._add(record, f"{where}, {given}, {member.tokens:,} tokens{rule}")

    def _on_trained(self, message: BatchTrained, record: Record) -> None:
        if message.step in self._steps:
            where = "skipped, without effect on" if message.skipped else "in"
            self._add(
                record, f"batch {message.step} on lineage {message.lineage}, {where} version {max(0, message.step)}"
            )

    def _on_scored(self, message: EvalScored, record: Record) -> None:
        for member in [one for one in message.members if one.trajectory_id == self.trajectory_id]:
            given = reward_text(member.reward, member.turn_rewards)
            self._add(record, f"evaluation of version {message.version}, {given}")


async def read_history(bus: Bus, trajectory_id: str) -> TrajectoryHistory:
    """Read the whole history of one trajectory from a run's topics.

    Raises:
        RunNotFound: there is no message about it.
    """

    def subject(kind: type[Message], key: str = "") -> str:
        return bus.tables.topic_of_type(kind).subject(bus.run, key)

    history = TrajectoryHistory(trajectory_id)
    progress = [subject(kind, trajectory_id) for kind in (TrajectoryProgressed, TrajectoryGenerated)]
    claims = [subject(kind, trajectory_id) for kind in (TrajectoryGraded, TrajectoryFailed)]
    drops = [subject(TrajectoryDropped, trajectory_id), subject(GroupDropped, prompt_of(trajectory_id))]
    await read_log(bus, ACTORS, history)
    await read_log(bus, PROMPTS, history, [subject(PromptIssued, trajectory_id)], headers_only=True)
    await read_log(bus, TRAJECTORIES, history, progress, headers_only=True)
    if history.logs:
        await read_log(bus, TRAJECTORIES, history, [subject(ProgressStored, log) for log in sorted(history.logs)])
    await read_log(bus, GRADES, history, claims)
    if not history.events():
        raise RunNotFound(f"run {bus.run}: there is no message about a trajectory {trajectory_id}")
    await read_log(bus, BATCHES, history, [*drops, subject(BatchPacked), subject(EvalScored)])
    await read_log(bus, TRAINING, history)
    return history


def _attempt_text(attempt: int, delivery: int) -> str:
    return f"attempt {attempt}, delivery {delivery}"
