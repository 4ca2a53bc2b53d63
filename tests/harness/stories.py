"""Runs as their logs would tell them, for tests of what is read from logs."""

from collections import Counter

import msgspec
import numpy as np
import xxhash

from asyncrl.bus.log import Record
from asyncrl.bus.publish import WRITER
from asyncrl.config.settings import Config
from asyncrl.state.audit.audit import audit
from asyncrl.state.audit.ledger import Ledger
from asyncrl.training.objective import objective_of
from harness.folds import failure
from topics.actors import RUN_OPENED, KeeperClaimed
from topics.batches import BATCH_PACKED, BatchGroup, BatchMember, BatchPacked, BatchTrained, Objective
from topics.ids import stage_of
from topics.prompts import PROMPT_ISSUED, PromptIssued, PromptRow
from topics.table import BUILT_IN, BY_NAME
from topics.topic import ACTORS, BATCHES, DEAD, ENGINES, FLEET, GRADES, PROMPTS, STREAMS, TRAINING, TRAJECTORIES
from topics.trajectories import (
    TRAJECTORY_GENERATED,
    TRAJECTORY_GRADED,
    Reference,
    Segment,
    TrajectoryDropped,
    TrajectoryGenerated,
    TrajectoryGraded,
    count_versions,
)
from topics.weights import WeightsPublished
from topics.wire import encode, headers_of

FIRST = (ACTORS, FLEET, DEAD, TRAINING, ENGINES)  # read before the logs that grow with every trajectory
LOGS = (*FIRST, PROMPTS, TRAJECTORIES, GRADES, BATCHES)


class Story:
    """Messages of a run, log by log, which can be changed."""

    def __init__(self):
        self.logs = {stream.name: [] for stream in STREAMS}
        for stream in STREAMS:
            if stream.keeper:
                self.publish(KeeperClaimed(stream.keeper, "story", "story"), BY_NAME[f"{stream.keeper}.claimed"])
        self.times = {}  # when the message of a topic was said that came at this place; the others at 0

    def publish(self, message, topic=None):
        """Append a message to its log; returns its sequence.

        Args:
            topic: of a type that several have.
        """
        topic = topic or BUILT_IN.topic_for(message)
        log = self.logs[topic.stream.name]
        log.append((topic, message))
        return len(log)

    def alter(self, topic, number, **fields):
        """Change fields of the message of a topic that came at this place among its like."""
        log, at = self._find(topic, number)
        log[at] = (topic, msgspec.structs.replace(log[at][1], **fields))

    def unsay(self, topic, number):
        log, at = self._find(topic, number)
        log[at] = None  # as a trim leaves it: what follows keeps its sequence

    def messages(self, topic):
        return [entry[1] for entry in self.logs[topic.stream.name] if entry and entry[0] is topic]

    def findings(self, *, deep=False, queues=None, logs=LOGS, first_result=0, legible=(), ended=()):
        ledger, counts = Ledger(first_result=first_result), Counter()
        for stream in logs:
            writer = {WRITER: "story"} if stream.keeper else {}
            for sequence, entry in enumerate(self.logs[stream.name], 1):
                if entry is not None:
                    topic, message = entry
                    body = encode(message) if deep else b""
                    at = self.times.get((topic.name, counts[topic.name]), 0)
                    counts[topic.name] += 1
                    record = Record(stream, sequence, "", headers_of(message) | writer, body, at)
                    bodyless = topic is PROMPT_ISSUED or (topic is TRAJECTORY_GENERATED and not deep)
                    ledger.apply(topic, topic.message.HEADERS.of(message) if bodyless else message, record)
        ledger.legible.update(legible)
        ledger.ended.update(ended)
        return audit(ledger, queues or {})

    def wrong(self, **options):
        """Kind and id of every violation."""
        return [(violation.kind, violation.id) for violation in self.findings(**options).violations]

    def _find(self, topic, number):
        log = self.logs[topic.stream.name]
        return log, [at for at, entry in enumerate(log) if entry and entry[0] is topic][number]

    # --- the parts of a run

    def issued(self, name, *, attempt=0):
        prompt_id, member = name.split("-")
        stage = stage_of(name)
        self.publish(PromptIssued(prompt_id, int(member), 2, [PromptRow("x")], attempt=attempt, stage=stage))

    def generated(self, name, versions, *, attempt=0):
        return self.publish(result(name, versions, attempt))

    def graded(self, name, versions=(0, 0, 0), reward=1.0, *, attempt=0):
        message = result(name, versions, attempt)
        body = encode(message)
        graded = TrajectoryGraded(
            trajectory_id=name,
            attempt=attempt,
            prompt_id=message.prompt_id,
            member=message.member,
            group_size=2,
            stage=message.stage,
            payload=Reference(self.publish(message), xxhash.xxh3_64_hexdigest(body), len(body)),
            versions=message.versions,
            reward=reward,
            lengths=[len(segment.tokens) for segment in message.segments],
        )
        self.publish(graded)

    def failed(self, name):
        self.publish(failure(name))

    def dropped(self, name, reason="rollout", *, attempt=0):
        drop = TrajectoryDropped(trajectory_id=name, attempt=attempt, reason=reason, again=reason == "lag")
        self.publish(drop)

    def packed(self, step, *names):
        groups = {}
        for name in names:
            grade = [graded for graded in self.messages(TRAJECTORY_GRADED) if graded.trajectory_id == name][-1]
            member = BatchMember(name, grade.attempt, grade.payload, grade.reward, 3, lengths=grade.lengths)
            groups.setdefault(grade.prompt_id, []).append(member)
        stage = "rl" if step > 0 else "warmup"
        opened = self.messages(RUN_OPENED)
        config = msgspec.convert(opened[-1].settings, Config) if opened else Config()
        objective = objective_of(config, step) if step > -config.warmup.steps else Objective()
        batch = BatchPacked(step, stage, [BatchGroup(*group) for group in groups.items()], step - 2, objective)
        return self.publish(batch)

    def trained(self, step, sequence, trajectories=2, lags=None, *, lineage=0):
        stage, lags = ("rl", lags or {0: 6}) if step > 0 else ("warmup", {-1: 3})
        packed = [batch for batch in self.messages(BATCH_PACKED) if batch.step == step]
        rewards = [member.reward for batch in packed for group in batch.groups for member in group.members] or [0.0]
        spread = [float(np.mean(rewards)), float(np.std(rewards))]
        self.publish(BatchTrained(step, lineage, stage, {}, lags, 0, spread, trajectories, sequence))

    def published(self, version, *, lineage=0, digest=""):
        weights = WeightsPublished(lineage, version, digest or f"{lineage}-{version}", "files", "there")
        self.publish(weights)


def result(name, versions, attempt=0):
    length = len(versions)
    segment = Segment(
        tokens=np.arange(length, dtype=np.int32),
        mask=np.ones(length, np.uint8),
        logprobs=np.zeros(length, np.float32),
        versions=np.array(versions, np.int32),
    )
    prompt_id, member = name.split("-")
    return TrajectoryGenerated(
        trajectory_id=name,
        attempt=attempt,
        prompt_id=prompt_id,
        member=int(member),
        group_size=2,
        stage=stage_of(name),
        rows=[],
        segments=[segment],
        completion="",
        versions=count_versions([segment]),
    )
