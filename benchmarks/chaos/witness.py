"""The witness of a run under chaos: it records every stored message and the time at which each role recovered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from asyncrl.bus.acks import MESSAGE_ID
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import TIME_TO_LIVE, WRITER
from asyncrl.run.fault_injection import NATS, RANK, SERVER
from topics.actors import ACTOR_STARTED, ActorStarted, FleetScaled, RunOpened
from topics.batches import BATCH_TRAINED, BatchTrained
from topics.engines import ENGINE_READY
from topics.evals import EVAL_SCORED
from topics.groups import GROUP_GRADED
from topics.prompts import PROMPT_ISSUED
from topics.topic import (
    ACTORS,
    BLOBS,
    FLEET,
    LEDGER_BLOBS,
    SECRETS,
    STREAMS,
    TRAINING,
    TRAJECTORIES,
    VITALS,
    WEIGHTS,
    Retention,
    Topic,
)
from topics.trajectories import (
    PROGRESS_STORED,
    TRAJECTORY_FAILED,
    TRAJECTORY_GENERATED,
    TRAJECTORY_GRADED,
    TRAJECTORY_PROGRESSED,
    TRAJECTORY_SUBMITTED,
    ProgressStored,
)
from topics.turns import TURN_JUDGED
from topics.weights import TRAINING_FINISHED, TrainingFinished
from topics.wire import decode

_WORK: dict[str, tuple[Topic[Any], ...]] = {  # the message that shows that a worker works
    "rollout": (PROGRESS_STORED, TRAJECTORY_PROGRESSED, TRAJECTORY_GENERATED),
    "reward": (TRAJECTORY_GRADED, TRAJECTORY_SUBMITTED, TRAJECTORY_FAILED),
    "groupreward": (GROUP_GRADED, TRAJECTORY_GRADED),
    "judge": (TURN_JUDGED,),
}
_ADVANCES = (TRAJECTORY_GENERATED, TRAJECTORY_GRADED, TRAJECTORY_FAILED, EVAL_SCORED, BATCH_TRAINED, TRAINING_FINISHED)
_KEEPERS = {stream.keeper: stream for stream in STREAMS if stream.keeper}
_SILENT_S = 60.0
_BODIES = (ACTORS, FLEET, TRAINING)  # logs whose bodies are read too


class SeenMessage(NamedTuple):
    """One message as it was stored."""

    topic: Topic[Any]
    record: Record
    message: Any  # None where only headers are read


Stored: TypeAlias = dict[str, dict[int, str]]  # message ids by stream and sequence, without messages that expire
Holds: TypeAlias = Callable[[SeenMessage], bool]


class Witness:
    """Reads every log of a run, also across the death of its servers."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.stored: Stored = {}
        self.steps = 0  # RL steps of the run
        self.finished = False
        self.rewards: dict[int, float] = {}  # by RL step
        self.step: int | None = None  # newest trained
        self.fleet: dict[str, int] = {}  # wanted processes by role
        self.issued: set[str] = set()  # trajectories
        # by trajectory: delivery of its result, and the time at which it was stored, ns
        self.ended: dict[str, tuple[int, int]] = {}
        self.samples = Samples()
        # monotonic clock: time of the last result, grade, step, evaluation or start of a new actor
        self.advanced_s = 0.0
        self.trained_s = 0.0  # monotonic clock: time of the last trained step
        self._actors: set[str] = set()  # all actors that have started
        self._writers: dict[str, str] = {}  # newest writer of each keeper's log
        self._waiting: list[tuple[Holds, asyncio.Future[int]]] = []
        self._readers = [
            LogReader(bus, stream, self._take, headers_only=stream not in _BODIES)
            for stream in STREAMS
            if stream not in (VITALS, BLOBS, WEIGHTS, LEDGER_BLOBS)
        ]
        progress = [PROGRESS_STORED.pattern(bus.run)]
        self._readers.append(LogReader(bus, TRAJECTORIES, self._take_progress, subjects=progress))

    async def start(self) -> None:
        """Read everything published so far, then follow."""
        for reader in self._readers:
            await reader.start()

    async def read(self) -> None:
        """Read all stored messages.

        Raises:
            TimeoutError: the server sends nothing.
        """
        await self.start()
        for reader in self._readers:
            async with asyncio.timeout(_SILENT_S):
                await reader.caught_up.wait()
        await self.close()

    async def close(self) -> None:
        """Stop reading."""
        for reader in self._readers:
            await reader.close()

    def works_again(self, role: str, since_ns: int, *, killed: bool = True) -> asyncio.Future[int]:
        """Return when a role recovered after an injection: the server's clock, ns.

        The evidence depends on the role:

        - keeper: another writer appends to its log; for the learner, a trained batch.
        - worker: a process of its role has started, and later a result of the role is stored.
        - engine: it is ready.
        - rank of the learner: the step after the current one is trained.
        - recorder: it has started.
        - server: a message is stored; in a cluster, a message of the learner's log.
        - `up`: a batch is trained.

        Args:
            killed: True if the role's process was killed; False if a process died at a point before `since_ns`. That
                process is a rank of the learner, whose writer continues, or a keeper, whose successor may already have
                written.
        """
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._sign(role, since_ns, killed=killed), future))
        return future

    def trained_after(self, step: int) -> asyncio.Future[int]:
        """Return the time at which a batch after `step` was trained: the server's clock, ns."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self.step is not None and self.step > step:
            future.set_result(time.time_ns())
        else:
            self._waiting.append((lambda seen: seen.topic is BATCH_TRAINED and seen.message.step > step, future))
        return future

    def _sign(self, role: str, since_ns: int, *, killed: bool) -> Holds:
        """Return the evidence that a role works again."""
        if role in _KEEPERS:
            stream, before = _KEEPERS[role], self._writers.get(role)
            return lambda seen: (
                seen.record.stream is stream
                and seen.record.time_ns > since_ns
                and (seen.record.headers.get(WRITER) != before or not killed)
                and (role != "learner" or seen.topic is BATCH_TRAINED)
            )
        if role == RANK:  # the step after the current one
            step = (self.step or 0) + 1
            return lambda seen: seen.topic is BATCH_TRAINED and seen.message.step > step
        if role in ("engine", SERVER):
            return lambda seen: seen.topic is ENGINE_READY and seen.record.time_ns > since_ns
        if role == "up":
            return lambda seen: seen.topic is BATCH_TRAINED and seen.record.time_ns > since_ns
        if role == NATS:
            led = (TRAINING,) if self.bus.clustered else STREAMS  # logs that the killed server led
            return lambda seen: seen.record.stream in led and seen.record.time_ns > since_ns
        started = False

        def works(seen: SeenMessage) -> bool:
            nonlocal started
            if seen.record.time_ns <= since_ns:
                return False
            if seen.topic is ACTOR_STARTED and isinstance(seen.message, ActorStarted) and seen.message.role == role:
                started = True
            return started and (role not in _WORK or seen.topic in _WORK[role])

        return works

    def _take(self, record: Record) -> None:
        topic = self.bus.tables.topic_of(record.subject)
        if topic is None:
            return
        if TIME_TO_LIVE not in record.headers:
            self.stored.setdefault(record.stream.name, {})[record.sequence] = record.headers.get(MESSAGE_ID, "")
        if topic in _ADVANCES:
            self.advanced_s = time.monotonic()
        message = decode(topic.message, record.data) if record.stream in _BODIES and record.data else None
        if isinstance(message, RunOpened):
            self.steps = message.steps
        elif isinstance(message, TrainingFinished):
            self.finished = True
        elif isinstance(message, ActorStarted) and message.actor_id not in self._actors:
            self._actors.add(message.actor_id)  # a restart is no progress
            self.advanced_s = time.monotonic()
        elif isinstance(message, FleetScaled):
            self.fleet.update(message.wanted)
        elif isinstance(message, BatchTrained):
            self.step, self.trained_s = message.step, time.monotonic()
            if message.stage == "rl":
                self.rewards[message.step] = message.rewards[0]
        if topic is PROMPT_ISSUED:
            self.issued.add(record.headers["trajectory"])
        if topic is TRAJECTORY_GENERATED:
            self.samples.ended(record.headers)
            self.ended[record.headers["trajectory"]] = (int(record.headers["delivery"]), record.time_ns)
        seen = SeenMessage(topic, record, message)
        for entry in list(self._waiting):
            holds, future = entry
            if future.done() or holds(seen):
                self._waiting.remove(entry)
                if not future.done():
                    future.set_result(record.time_ns)
        if record.stream.keeper and WRITER in record.headers:
            self._writers[record.stream.keeper] = record.headers[WRITER]

    def _take_progress(self, record: Record) -> None:
        if record.data:  # other entries are in the blob stream, so the stored tokens are a lower bound
            for entry in decode(ProgressStored, record.data).entries:
                self.samples.stored((entry.trajectory_id, entry.attempt), entry.delivery, entry.offset)


class Samples:
    """Counts sampled tokens, and the greatest possible number of tokens sampled twice, from progress and results."""

    def __init__(self) -> None:
        self.tokens = 0  # of results
        self._kept: dict[tuple[str, int], dict[int, int]] = {}  # by attempt: tokens in progress, by delivery
        self._ended: dict[tuple[str, int], tuple[int, int]] = {}  # by attempt: delivery and tokens of the result

    def stored(self, key: tuple[str, int], delivery: int, offset: int) -> None:
        """Record a progress entry: an attempt has sampled `offset` tokens."""
        self._kept.setdefault(key, {})[delivery] = offset

    def ended(self, headers: dict[str, str]) -> None:
        """Record the headers of a result."""
        key, delivery = (headers["trajectory"], int(headers["attempt"])), int(headers["delivery"])
        counts = [count.split(":") for count in headers["versions"].split(",") if count]
        tokens = sum(int(tokens) for version, tokens in counts if version != "-1")
        self._ended[key] = (delivery, tokens)
        self.tokens += tokens

    def again(self, progress_tokens: int) -> int:
        """Return an upper bound of the tokens sampled twice: a lost delivery loses its tokens since the last progress.

        Args:
            progress_tokens: tokens between two progress messages.
        """
        found = 0
        for key, (last, tokens) in self._ended.items():
            kept = 0
            for delivery in range(1, last):
                kept = max(kept, self._kept.get(key, {}).get(delivery, 0))
                found += min(progress_tokens, tokens - kept)
        return found


def missing(before: Stored, after: Stored, *, payload: bool) -> list[str]:
    """Return messages that are lost or changed. Data keys are left out, because purges erase them; the audit reports
    data whose key is lost.

    Args:
        payload: whether payload streams were also kept whole.
    """
    kept = {stream.name for stream in STREAMS if stream.keep is Retention.LEDGER or payload} - {SECRETS.name}
    return [
        f"{name} {sequence}: {message_id} was stored, now there is {after.get(name, {}).get(sequence, 'nothing')}"
        for name in sorted(kept & before.keys())
        for sequence, message_id in before[name].items()
        if after.get(name, {}).get(sequence) != message_id
    ]
