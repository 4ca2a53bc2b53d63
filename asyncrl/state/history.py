"""The history of one trajectory, from the logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from asyncrl.bus.connection import Bus
from asyncrl.bus.listen import read_log
from asyncrl.bus.log import Record
from asyncrl.bus.publish import BY
from asyncrl.run.find import RunNotFound
from topics.actors import RUN_OPENED
from topics.batches import BATCH_PACKED, BATCH_TRAINED, BatchPacked, BatchTrained
from topics.evals import EVAL_SCORED, EvalScored
from topics.groups import GROUP_DROPPED, GroupDropped
from topics.prompts import PROMPT_ISSUED
from topics.topic import ACTORS, BATCHES, GRADES, PROMPTS, TRAINING, TRAJECTORIES, Topic
from topics.trajectories import (
    PROGRESS_STORED,
    TRAJECTORY_DROPPED,
    TRAJECTORY_FAILED,
    TRAJECTORY_GENERATED,
    TRAJECTORY_GRADED,
    TRAJECTORY_PROGRESSED,
    ProgressStored,
    TrajectoryDropped,
    TrajectoryFailed,
    TrajectoryGraded,
)


class HistoryEvent(NamedTuple):
    """One message about a trajectory."""

    time_ns: int  # server's clock
    stream: str
    sequence: int
    what: str  # "generated"
    about: str


class TrajectoryHistory:
    """Collects the messages about one trajectory, in whatever order the logs are read."""

    def __init__(self, trajectory_id: str) -> None:
        self.trajectory_id = trajectory_id
        self.began_ns = 0  # when the run was opened, or its first message was published
        self.logs: set[str] = set()  # progress logs with entries of it
        self.result = 0  # sequence of its newest result
        self._events: list[HistoryEvent] = []
        self._trained: list[tuple[int, HistoryEvent]] = []  # of every batch: which one is ours is known in the end
        self._steps: set[int] = set()  # batches that hold it
        self._describe: Mapping[str, Callable[[Any, Record], str]] = {
            PROMPT_ISSUED.name: _issued,
            TRAJECTORY_PROGRESSED.name: self._progressed,
            PROGRESS_STORED.name: self._stored,
            TRAJECTORY_GENERATED.name: self._generated,
            TRAJECTORY_GRADED.name: _graded,
            TRAJECTORY_FAILED.name: _failed,
            TRAJECTORY_DROPPED.name: _dropped,
            GROUP_DROPPED.name: _group_dropped,
            BATCH_PACKED.name: self._packed,
            EVAL_SCORED.name: self._scored,
        }

    def apply(self, topic: Topic[Any], message: Any, record: Record) -> None:
        """Fold in one message of those about this trajectory or its group, and of all that are about batches."""
        if topic is RUN_OPENED:
            self.began_ns = self.began_ns or record.time_ns
        elif topic is BATCH_TRAINED:
            self._trained.append((message.step, _event(record, "trained", _trained(message))))
        elif topic.name in self._describe and (about := self._describe[topic.name](message, record)):
            self._events.append(_event(record, topic.name.split(".")[1], about))

    def refuse(self, record: Record, error: Exception) -> None:
        """Take note of a message that cannot be read."""
        self._events.append(_event(record, "unreadable", str(error)))

    def events(self) -> list[HistoryEvent]:
        """All of it in order of time."""
        trained = [event for step, event in self._trained if step in self._steps]
        return sorted([*self._events, *trained])

    @property
    def ended(self) -> bool:
        """Return whether a batch or a score holds it, or it was dropped."""
        return any(event.what in ("packed", "dropped", "scored") for event in self._events)

    def _progressed(self, _: None, record: Record) -> str:
        headers = record.headers
        self.logs.add(headers["log"])
        offset = int(headers["offset"])
        at = f"continued at {offset:,} tokens" if offset else "from its start"
        return f"attempt {headers['attempt']}, delivery {headers['delivery']}, {at}, stored in log {headers['log']}"

    def _stored(self, message: ProgressStored, _: Record) -> str:
        found = [entry for entry in message.entries if entry.trajectory_id == self.trajectory_id]
        return "; ".join(
            f"attempt {entry.attempt}, delivery {entry.delivery}, {entry.offset:,} tokens so far" for entry in found
        )

    def _generated(self, _: None, record: Record) -> str:
        self.result = record.sequence
        return _generated(record)

    def _packed(self, message: BatchPacked, _: Record) -> str:
        for group in message.groups:
            for member in group.members:
                if member.trajectory_id == self.trajectory_id:
                    self._steps.add(message.step)
                    masked = f"; tokens older than version {message.min_version} are masked" * (message.min_version > 0)
                    return (
                        f"batch {message.step}, attempt {member.attempt}, one of {len(group.members)} of its group, "
                        f"reward {member.reward:g}, {member.tokens:,} tokens{masked if message.stage == 'rl' else ''}"
                    )
        return ""

    def _scored(self, message: EvalScored, _: Record) -> str:
        found = [member for member in message.members if member.trajectory_id == self.trajectory_id]
        return f"evaluation of version {message.version}, reward {found[0].reward:g}" if found else ""


async def read_history(bus: Bus, trajectory_id: str) -> TrajectoryHistory:
    """Read the whole history of one trajectory from a run's topics.

    Raises:
        RunNotFound: there is no message about it.
    """
    run, prompt_id = bus.run, trajectory_id.rsplit("-", 1)[0]
    history = TrajectoryHistory(trajectory_id)
    progress = [topic.subject(run, trajectory_id) for topic in (TRAJECTORY_PROGRESSED, TRAJECTORY_GENERATED)]
    claims = [topic.subject(run, trajectory_id) for topic in (TRAJECTORY_GRADED, TRAJECTORY_FAILED)]
    drops = [TRAJECTORY_DROPPED.subject(run, trajectory_id), GROUP_DROPPED.subject(run, prompt_id)]
    await read_log(bus, ACTORS, [RUN_OPENED.subject(run)], history)
    await read_log(bus, PROMPTS, [PROMPT_ISSUED.subject(run, trajectory_id)], history, headers_only=True)
    await read_log(bus, TRAJECTORIES, progress, history, headers_only=True)
    if history.logs:
        await read_log(bus, TRAJECTORIES, [PROGRESS_STORED.subject(run, log) for log in sorted(history.logs)], history)
    await read_log(bus, GRADES, claims, history)
    if not history.events():
        raise RunNotFound(f"run {run}: there is no message about a trajectory {trajectory_id}")
    await read_log(bus, BATCHES, [*drops, BATCH_PACKED.subject(run), EVAL_SCORED.subject(run)], history)
    await read_log(bus, TRAINING, [BATCH_TRAINED.subject(run)], history)
    return history


def _event(record: Record, what: str, about: str) -> HistoryEvent:
    by = f"by {record.headers[BY]}: " if BY in record.headers else ""
    return HistoryEvent(record.time_ns, record.stream.name, record.sequence, what, by + about)


def _issued(_: None, record: Record) -> str:
    headers = record.headers
    again = f", the row of {headers['origin']} again" if "origin" in headers else ""
    return (
        f"attempt {headers['attempt']}, {headers['stage']}, group of {headers['group-size']}, "
        f"for version {headers['min-version']} or newer{again}"
    )


def _generated(record: Record) -> str:
    headers = record.headers
    counts = [count.split(":") for count in headers["versions"].split(",") if count]
    tokens = ", ".join(
        f"{int(tokens):,} tokens " + ("of a teacher" if version == "-1" else f"by version {version}")
        for version, tokens in counts
    )
    return f"attempt {headers['attempt']}, delivery {headers['delivery']}, {tokens or 'no trainable token'}"


def _graded(message: TrajectoryGraded, _: Record) -> str:
    return (
        f"attempt {message.attempt}, delivery {message.delivery}, reward {message.reward:g}, "
        f"for message {message.payload.sequence} of TRAJECTORIES"
    )


def _failed(message: TrajectoryFailed, _: Record) -> str:
    who = "reward" if message.reason == "reward" else "rollout"
    reason = f"{message.reason}: {message.detail}"
    return f"attempt {message.attempt}, delivery {message.delivery}, claimed by a {who} worker, {reason}"


def _dropped(message: TrajectoryDropped, _: Record) -> str:
    lag = f", lag {message.lag}" if message.reason == "lag" else ""
    detail = f": {message.detail}" if message.detail else ""
    return f"attempt {message.attempt}, {message.reason}{lag}{detail}"


def _group_dropped(message: GroupDropped, _: Record) -> str:
    return f"with its group, {message.reason}"


def _trained(message: BatchTrained) -> str:
    where = "skipped, without effect on" if message.skipped else "in"
    return f"batch {message.step} on lineage {message.lineage}, {where} version {max(0, message.step)}"
