"""Messages for tests of folds, as their logs would hold them."""

from asyncrl.bus.log import Record
from topics.batches import BatchGroup, BatchMember, BatchPacked, BatchTrained
from topics.groups import GroupDropped
from topics.prompts import ONLY_TASK, PromptIssued, PromptRow
from topics.table import BUILT_IN
from topics.trajectories import (
    Reference,
    TrajectoryDropped,
    TrajectoryFailed,
    TrajectoryGraded,
    VersionCount,
)
from topics.wire import headers_of

NO_PAYLOAD = Reference(1, "00", 1)


def failure(name, reason="rollout", *, size=2, detail="it did", tokens=0):
    prompt_id, member = name.rsplit("-", 1)
    return TrajectoryFailed(
        trajectory_id=name,
        prompt_id=prompt_id,
        member=int(member),
        group_size=size,
        stage="rl",
        reason=reason,
        detail=detail,
        tokens=tokens,
    )


class Feed:
    """Feeds a fold with messages and applies the decisions it makes, as its own log would."""

    def __init__(self, fold, own=()):
        self.fold = fold
        self.sequence = 0
        self.known = set()  # prompts that were issued

    def publish(self, message, *, at_s=0.0, headers=None):
        topic = BUILT_IN.topic_for(message)
        self.sequence += 1
        record = Record(topic.stream, self.sequence, "", headers or headers_of(message), b"", int(at_s * 1e9))
        self.fold.apply(topic, message, record)
        return self

    def read_back(self, decisions, *, at_s=0.0):
        for decision in decisions:
            self.publish(decision, at_s=at_s)
        return decisions

    def issued(self, name, *, size=2, stage="rl", at_s=0.0, attempt=0, min_version=0, **rules):
        prompt_id, member = name.rsplit("-", 1)
        message = PromptIssued(
            prompt_id=prompt_id,
            member=int(member),
            group_size=size,
            rows=[PromptRow("x")],
            stage=stage,
            attempt=attempt,
            min_version=min_version,
            **rules,
        )
        self.known.add(prompt_id)
        return self.publish(message, at_s=at_s)

    def graded(self, name, reward=1.0, *, versions=((0, 3),), size=2, stage="rl", attempt=0, at_s=0.0):
        prompt_id, member = name.rsplit("-", 1)
        if prompt_id not in self.known:
            self.issued(name, size=size, stage=stage)
        counts = [VersionCount(version, tokens) for version, tokens in versions]
        message = TrajectoryGraded(
            trajectory_id=name,
            attempt=attempt,
            prompt_id=prompt_id,
            member=int(member),
            group_size=size,
            stage=stage,
            payload=NO_PAYLOAD,
            versions=counts,
            reward=reward,
        )
        return self.publish(message, at_s=at_s)

    def group(self, prompt_id, rewards=(0.0, 1.0), *, versions=((0, 3),), stage="rl"):
        for member, reward in enumerate(rewards):
            self.graded(f"{prompt_id}-{member}", reward, versions=versions, size=len(rewards), stage=stage)
        return self

    def failed(self, name, reason="rollout", *, size=2):
        if name.rsplit("-", 1)[0] not in self.known:
            self.issued(name, size=size)
        return self.publish(failure(name, reason, size=size))

    def packed(self, step, *prompt_ids, stage="rl", tasks=()):
        groups = [
            BatchGroup(name, [BatchMember(f"{name}-0", 0, NO_PAYLOAD, 1.0, 3)], task=task)
            for name, task in zip(prompt_ids, tasks or [ONLY_TASK] * len(prompt_ids), strict=True)
        ]
        return self.publish(BatchPacked(step, stage, groups, step - 2))

    def trained(self, step, *, stage="rl"):
        message = BatchTrained(
            step=step,
            lineage=0,
            stage=stage,
            metrics={},
            lags={},
            masked=0,
            rewards=[0.0, 0.0],
            trajectories=1,
            batch_sequence=1,
        )
        return self.publish(message)

    def too_old(self, name, attempt=0):
        message = TrajectoryDropped(trajectory_id=name, attempt=attempt, reason="lag", again=True)
        return self.publish(message)

    def dropped(self, prompt_id):
        return self.publish(GroupDropped(prompt_id, "failed"))


def decided(fed, now_s: float = 1.0):
    """All decisions until there are no more, each read back from the log."""
    found = []
    while decisions := fed.read_back(fed.fold.decide(now_s), at_s=now_s):
        found += decisions
    return found
