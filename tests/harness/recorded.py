"""The real messages of a run, in memory: they can be changed, and audited as a run's topics are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from actors.prompter.data_order import DataOrder
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import unpack
from asyncrl.bus.sealing import open_body
from asyncrl.config.settings import Config
from asyncrl.data.sources import open_source
from asyncrl.state.audit.audit import Findings, Queue, audit
from asyncrl.state.audit.ledger import Ledger
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.table import BUILT_IN, BY_NAME
from topics.topic import (
    ACTORS,
    BATCHES,
    DEAD,
    ENGINES,
    FLEET,
    GRADES,
    PROMPTS,
    SESSIONS,
    TRAINING,
    TRAJECTORIES,
    TURNS,
    Topic,
)
from topics.trajectories import TRAJECTORY_GRADED, TrajectoryGraded
from topics.wire import Message, encode, headers_of

FIRST = (ACTORS, FLEET, DEAD, TRAINING, ENGINES)  # read before the logs that grow with every trajectory
LOGS = (*FIRST, TURNS, SESSIONS, PROMPTS, TRAJECTORIES, GRADES, BATCHES)


async def _opened(bus: Bus, record: Record) -> Record:
    """A record as it was before it was sealed."""
    topic = BUILT_IN.topic_of(record.subject)
    assert topic is not None
    return record._replace(data=await open_body(bus, topic, record, record.data))


class Recorded:
    """Messages by log, each log in its order."""

    def __init__(self, logs: dict[str, list[Record]], run: str, base: Any) -> None:
        self.logs = logs
        self.run = run
        self.base = base

    @classmethod
    async def read(cls, bus: Bus, base: Any) -> Recorded:
        """Everything that is stored now."""
        logs: dict[str, list[Record]] = {}
        for stream in LOGS:
            reader = LogReader(bus, stream, logs.setdefault(stream.name, []).append)
            await reader.start()
            await reader.caught_up.wait()
            await reader.close()
        for name in (TURNS.name, TRAJECTORIES.name):
            logs[name] = [await _opened(bus, record) for record in logs[name]]
        return cls(logs, bus.run, base)

    def copy(self) -> Recorded:
        """The same messages, to be changed."""
        return Recorded({name: list(records) for name, records in self.logs.items()}, self.run, self.base)

    def until(self, time_ns: int) -> Recorded:
        """Records that had been stored at a moment."""
        logs = {name: [record for record in log if record.time_ns <= time_ns] for name, log in self.logs.items()}
        return Recorded(logs, self.run, self.base)

    def places(self, topic: Topic[Any]) -> list[int]:
        """Sequences of the messages of a topic in their log."""
        return [at for at, record in enumerate(self._log(topic)) if BUILT_IN.topic_of(record.subject) is topic]

    def records(self, topic: Topic[Any]) -> list[Record]:
        return [self._log(topic)[at] for at in self.places(topic)]

    def messages(self, topic: Topic[Any]) -> list[Any]:
        return [unpack(record, record.data)[1] for record in self.records(topic)]

    def alter(self, topic: Topic[Any], number: int, change: Callable[[Any], Any] | None = None, **fields: Any) -> None:
        """Change the message of a topic that came at this place among its like (-1: the last), and its headers."""
        at = self.places(topic)[number]
        record = self._log(topic)[at]
        message = unpack(record, record.data)[1]
        if change is not None:
            change(message)
        message = msgspec.structs.replace(message, **fields)
        headers = record.headers | (headers_of(message))
        key = getattr(message, topic.key) if topic.key else ""
        subject = topic.subject(self.run, key)
        self._log(topic)[at] = record._replace(data=encode(message), headers=headers, subject=subject)

    def replace(self, topic: Topic[Any], number: int, **fields: Any) -> None:
        """Change a record itself: its time, headers or bytes."""
        at = self.places(topic)[number]
        self._log(topic)[at] = self._log(topic)[at]._replace(**fields)

    def remove(self, topic: Topic[Any], wanted: Callable[[Any], bool] | int) -> None:
        """Take away messages of a topic, as a purge does: those after them keep their sequences."""
        places = self.places(topic)
        gone = [places[wanted]] if isinstance(wanted, int) else []
        if callable(wanted):
            gone = [at for at, message in zip(places, self.messages(topic), strict=True) if wanted(message)]
        log = self._log(topic)
        self.logs[log[0].stream.name] = [record for at, record in enumerate(log) if at not in gone]

    def add(self, topic: Topic[Any], message: Message, *, at: int | None = None, writer: str = "") -> None:
        """Put a message behind all others of its log, or before the one at a place; those behind it move on.

        Its time and, unless it is given, its writer are those of the message in that place.
        """
        log = self.logs[topic.stream.name]
        pattern = log[-1 if at is None else at]
        headers = headers_of(message)
        if topic.stream.keeper:
            headers |= {"writer": writer or pattern.headers["writer"], "by": pattern.headers["by"]}
        key = getattr(message, topic.key) if topic.key else ""
        record = Record(topic.stream, 0, topic.subject(self.run, key), headers, encode(message), pattern.time_ns)
        if at is None:
            log.append(record._replace(sequence=log[-1].sequence + 1))
        else:
            moved = [one._replace(sequence=one.sequence + 1) for one in log[at:]]
            self.logs[topic.stream.name] = [*log[:at], record._replace(sequence=log[at].sequence), *moved]

    def batch(self, step: int) -> int:
        """Place of a batch among the batches."""
        return next(at for at, packed in enumerate(self.messages(BATCH_PACKED)) if packed.step == step)

    def train_again(self, step: int) -> None:
        """Let `batch.trained` tell what the batch of a step is now: only the batch itself may be wrong."""
        at = self.batch(step)
        packed = self.messages(BATCH_PACKED)[at]
        sequence = self.records(BATCH_PACKED)[at].sequence
        grades: dict[tuple[str, int], TrajectoryGraded] = {}
        for grade in self.messages(TRAJECTORY_GRADED):
            grades.setdefault((grade.trajectory_id, grade.attempt), grade)
        members = [member for group in packed.groups for member in group.members]
        lags: dict[int, int] = {}
        masked = 0
        for member in members:
            for count in grades[member.trajectory_id, member.attempt].versions:
                if 0 <= count.version < packed.min_version:
                    masked += count.tokens
                else:
                    lag = -1 if count.version < 0 else max(0, step - 1 - count.version)
                    lags[lag] = lags.get(lag, 0) + count.tokens
        rewards = [member.reward for member in members]
        number = next(at for at, trained in enumerate(self.messages(BATCH_TRAINED)) if trained.step == step)
        self.alter(
            BATCH_TRAINED,
            number,
            stage=packed.stage,
            lags=lags,
            masked=masked,
            rewards=[float(np.mean(rewards)), float(np.std(rewards))],
            trajectories=len(members),
            batch_sequence=sequence,
        )

    def findings(self, *, deep: bool = True, queues: dict[str, Queue] | None = None) -> Findings:
        """Audit what is there, as `asyncrl audit` reads it."""
        results = self.logs[TRAJECTORIES.name]
        ledger = Ledger(first_result=results[0].sequence if results else 0)
        for stream in FIRST:
            self._feed(ledger, self.logs[stream.name], deep=True)
        assert ledger.opening.config is not None
        order = DataOrder(ledger, ledger.opening.config, self.base)
        merged = [record for stream in LOGS[len(FIRST) :] for record in self.logs[stream.name]]
        self._feed(ledger, sorted(merged, key=lambda record: record.time_ns), deep=deep)
        if deep:
            task = self.config.task
            source = open_source(task.source, options=task.options, seed=self.config.seed, base=self.base)
            for carried in order.carried("task"):
                order.check(carried, [source.row(place) for place in order.places(carried)])
        for name, sequence in ledger.excused():
            [record] = [one for one in self.logs[name] if one.sequence == sequence]
            unpack(record, record.data)
            ledger.legible.add((name, sequence))
        return audit(ledger, queues or {})

    def kinds(self, **options: Any) -> set[str]:
        return {violation.kind for violation in self.findings(**options).violations}

    @property
    def config(self) -> Config:
        opened = next(iter(self.messages(BY_NAME["run.opened"])))
        return msgspec.convert(opened.settings, Config)

    def _log(self, topic: Topic[Any]) -> list[Record]:
        return self.logs[topic.stream.name]

    def _feed(self, ledger: Ledger, records: Sequence[Record], *, deep: bool) -> None:
        for record in records:
            topic = BUILT_IN.topic_of(record.subject)
            if topic is not None and topic.name.endswith(".snapshot"):
                continue
            try:
                if not deep and record.stream in (PROMPTS, TRAJECTORIES):
                    ledger.apply(*unpack(record, None), record)
                else:
                    ledger.apply(*unpack(record, record.data), record)
            except (LookupError, ValueError) as error:
                ledger.refuse(record, error)
