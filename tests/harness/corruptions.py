"""Corruptions of a recorded run, one at a time: what is done to it, and what the audit calls that."""

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from harness.recorded import Recorded
from topics.actors import REISSUE_REQUESTED, RUN_OPENED, SKIP_REQUESTED, ReissueRequested, SkipRequested
from topics.batches import BATCH_PACKED, BATCH_TRAINED, Objective
from topics.engines import ENGINE_READY
from topics.groups import GROUP_DROPPED, GroupDropped
from topics.prompts import PROMPT_ISSUED, PromptRow
from topics.table import BY_NAME
from topics.topic import ACTORS, Topic
from topics.trajectories import (
    TRAJECTORY_DROPPED,
    TRAJECTORY_GENERATED,
    TRAJECTORY_GRADED,
    TrajectoryDropped,
    TrajectoryGenerated,
)
from topics.weights import CHECKPOINT_SAVED, TRAINING_FINISHED, WEIGHTS_PUBLISHED, CheckpointSaved, WeightsPublished
from topics.wire import Message, encode

STEPS = 8  # of the recorded run


def remove_group(packed):
    del packed.groups[1]


def lose_group(r: Recorded) -> None:
    r.alter(BATCH_PACKED, r.batch(5), remove_group)
    r.train_again(5)


def lose_member(r: Recorded) -> None:
    r.alter(BATCH_PACKED, r.batch(5), lambda packed: packed.groups[1].members.pop())
    r.train_again(5)


def train_half(r: Recorded) -> None:
    lags = r.messages(BATCH_TRAINED)[-1].lags
    r.alter(BATCH_TRAINED, -1, lags={lag: tokens // 2 for lag, tokens in lags.items()})


def train_more(r: Recorded) -> None:
    lags = r.messages(BATCH_TRAINED)[-1].lags
    r.alter(BATCH_TRAINED, -1, lags={lag: tokens + 1 for lag, tokens in lags.items()})


def narrow_bound(r: Recorded) -> None:
    r.alter(BATCH_PACKED, r.batch(6), min_version=5)
    r.train_again(6)


def widen_bound(r: Recorded) -> None:
    r.alter(BATCH_PACKED, r.batch(6), min_version=2)
    r.train_again(6)


def unclaimed_writer(r: Recorded) -> None:
    headers = r.records(BATCH_PACKED)[7].headers
    r.replace(BATCH_PACKED, 7, headers=headers | {"writer": "0123456789abcdef"})


def deposed_writer(r: Recorded) -> None:
    """Another learner claims the log, and the one before goes on."""
    claimed = BY_NAME["learner.claimed"]
    [claim] = r.messages(claimed)
    at = r.places(BATCH_TRAINED)[8]
    r.add(claimed, msgspec.structs.replace(claim, nonce="fedcba9876543210"), at=at, writer="fedcba9876543210")


def unclaimed_log(r: Recorded) -> None:
    r.remove(BY_NAME["buffer.claimed"], 0)


def rename_stage(r: Recorded) -> None:
    r.alter(BATCH_PACKED, r.batch(6), stage="warmup")
    r.alter(BATCH_TRAINED, 9, stage="warmup")


def issue_for_the_warmup(r: Recorded) -> None:
    r.alter(PROMPT_ISSUED, -1, stage="warmup")


def open_again(r: Recorded) -> None:
    [first] = r.messages(RUN_OPENED)
    settings = copy.deepcopy(first.settings)
    settings["buffer"]["max_lag"] = 50
    r.add(RUN_OPENED, msgspec.structs.replace(first, settings=settings))


def grade_late(r: Recorded) -> None:
    member = r.messages(BATCH_PACKED)[r.batch(3)].groups[0].members[0]
    number = [grade.trajectory_id for grade in r.messages(TRAJECTORY_GRADED)].index(member.trajectory_id)
    r.replace(TRAJECTORY_GRADED, number, time_ns=r.records(BATCH_PACKED)[r.batch(3)].time_ns + 1)


def packed_grade(r: Recorded) -> int:
    """Which of the grades is that of a member of a batch."""
    member = r.messages(BATCH_PACKED)[r.batch(6)].groups[0].members[0].trajectory_id
    return [grade.trajectory_id for grade in r.messages(TRAJECTORY_GRADED)].index(member)


def grade_before(r: Recorded) -> None:
    """Grade it twice, differently; the batch holds the second grade."""
    number = packed_grade(r)
    first = r.messages(TRAJECTORY_GRADED)[number]
    at = r.places(TRAJECTORY_GRADED)[number]
    r.add(TRAJECTORY_GRADED, msgspec.structs.replace(first, reward=first.reward - 0.25), at=at)


def fail_before(r: Recorded) -> None:
    number = packed_grade(r)
    grade = r.messages(TRAJECTORY_GRADED)[number]
    failed = BY_NAME["trajectory.failed"]
    fields = {name: getattr(grade, name) for name in ("trajectory_id", "prompt_id", "member", "group_size", "stage")}
    r.add(failed, failed.message(**fields, reason="rollout", detail=""), at=r.places(TRAJECTORY_GRADED)[number])


def more_tokens_of_a_member(packed):
    packed.groups[0].members[0].tokens += 1


def another_length(packed):
    packed.groups[0].members[0].lengths[0] += 1


def other_lengths(r: Recorded) -> None:
    """A grade, and the batch that took it over, name other lengths than the result has."""
    r.alter(TRAJECTORY_GRADED, packed_grade(r), lambda grade: grade.lengths.append(3))
    r.alter(BATCH_PACKED, r.batch(6), lambda packed: packed.groups[0].members[0].lengths.append(3))


def another_rate(packed):
    packed.objective = msgspec.structs.replace(packed.objective, learning_rate=0.5)


def another_reward(packed):
    packed.groups[0].members[0].reward += 0.125


def invent_version(r: Recorded) -> None:
    r.add(WEIGHTS_PUBLISHED, WeightsPublished(0, 42, "d" * 32, "files", "lineage0-v000042"))


def publish_otherwise(r: Recorded) -> None:
    r.add(WEIGHTS_PUBLISHED, msgspec.structs.replace(r.messages(WEIGHTS_PUBLISHED)[3], digest="d" * 32))


def save_on_no_line(r: Recorded) -> None:
    saved = r.messages(CHECKPOINT_SAVED)[-1]
    r.add(CHECKPOINT_SAVED, msgspec.structs.replace(saved, lineage=5))


def leave_out(r: Recorded) -> None:
    """Nothing of one prompt is there."""
    r.remove(PROMPT_ISSUED, lambda message: message.prompt_id == "p000009")
    r.remove(TRAJECTORY_GENERATED, lambda message: message.prompt_id == "p000009")
    r.remove(TRAJECTORY_GRADED, lambda message: message.prompt_id == "p000009")
    for packed in r.messages(BATCH_PACKED):
        if any(group.prompt_id == "p000009" for group in packed.groups):
            groups = [group for group in packed.groups if group.prompt_id != "p000009"]
            r.alter(BATCH_PACKED, r.batch(packed.step), groups=groups)
            r.train_again(packed.step)


def pack_again(r: Recorded) -> None:
    first = r.messages(BATCH_PACKED)[r.batch(2)].groups[0]
    r.alter(BATCH_PACKED, r.batch(7), lambda packed: packed.groups.append(first))
    r.train_again(7)


def repeat_last(r: Recorded, topic: Topic[Any]) -> None:
    r.add(topic, r.messages(topic)[-1])


def drop(r: Recorded) -> None:
    r.add(TRAJECTORY_DROPPED, TrajectoryDropped(trajectory_id="p000001-1", attempt=0, reason="lag"))


def probabilities(r: Recorded) -> None:
    """The oldest result has probabilities in place of log-probs."""

    def change(result: TrajectoryGenerated) -> None:
        for segment in result.segments:
            segment.logprobs = np.exp(segment.logprobs)

    r.alter(TRAJECTORY_GENERATED, 0, change)


def swap_results(r: Recorded) -> None:
    """Two members refer to each other's tokens, in their grades and in the batch."""
    packed = r.messages(BATCH_PACKED)[r.batch(4)]
    one, other = packed.groups[0].members[:2]
    names = [grade.trajectory_id for grade in r.messages(TRAJECTORY_GRADED)]
    r.alter(TRAJECTORY_GRADED, names.index(one.trajectory_id), payload=other.payload)
    r.alter(TRAJECTORY_GRADED, names.index(other.trajectory_id), payload=one.payload)
    one.payload, other.payload = other.payload, one.payload
    r.alter(BATCH_PACKED, r.batch(4), groups=packed.groups)


def unpublish(r: Recorded) -> None:
    """Remove the newest version of which tokens were trained; the load decides which one that is."""
    groups = [group for batch in r.messages(BATCH_PACKED) for group in batch.groups]
    packed = {member.trajectory_id for group in groups for member in group.members}
    results = [result for result in r.messages(TRAJECTORY_GENERATED) if result.trajectory_id in packed]
    newest = max(int(segment.versions.max()) for result in results for segment in result.segments)
    r.remove(WEIGHTS_PUBLISHED, lambda message: message.version == newest)


def another_row(r: Recorded) -> None:
    r.alter(PROMPT_ISSUED, -1, rows=[PromptRow("^aaaa=", "aaaa")])


def graded_against_another_row(r: Recorded) -> None:
    r.alter(TRAJECTORY_GENERATED, -1, rows=[PromptRow("^aaaa=", "aaaa")])
    name = r.messages(TRAJECTORY_GENERATED)[-1].trajectory_id
    grades = [grade.trajectory_id for grade in r.messages(TRAJECTORY_GRADED)]
    assert name in grades


def no_row(r: Recorded) -> None:
    name = r.messages(PROMPT_ISSUED)[-1].prompt_id
    for number, message in enumerate(r.messages(PROMPT_ISSUED)):
        if message.prompt_id == name:
            r.alter(PROMPT_ISSUED, number, rows=[])


def another_order(r: Recorded) -> None:
    """The rows of two prompts are exchanged, for all their members and results."""
    names = ("p000010", "p000011")
    rows = {name: next(m.rows for m in r.messages(PROMPT_ISSUED) if m.prompt_id == name and m.rows) for name in names}
    exchanged = dict(zip(names, reversed(rows.values()), strict=True))
    for topic in (PROMPT_ISSUED, TRAJECTORY_GENERATED):
        for number, message in enumerate(r.messages(topic)):
            if message.prompt_id in names and message.rows:
                r.alter(topic, number, rows=exchanged[message.prompt_id])


def raise_min_version(r: Recorded) -> None:
    r.alter(PROMPT_ISSUED, -1, min_version=STEPS)


def drop_a_healthy_member(r: Recorded, reason: str) -> None:
    """One member of a batch is dropped instead, and nothing that was graded says why."""
    at = r.batch(5)
    member = r.messages(BATCH_PACKED)[at].groups[1].members[0]
    r.alter(BATCH_PACKED, at, lambda packed: packed.groups[1].members.remove(member))
    drop = TrajectoryDropped(trajectory_id=member.trajectory_id, attempt=0, reason=reason)
    r.add(TRAJECTORY_DROPPED, drop, at=r.places(BATCH_PACKED)[at])
    r.train_again(5)


def long_before(r: Recorded, prompt_id: str) -> None:
    """A group was issued and graded an hour before all else."""
    for topic in (PROMPT_ISSUED, TRAJECTORY_GRADED):
        for number, message in enumerate(r.messages(topic)):
            if message.prompt_id == prompt_id:
                r.replace(topic, number, time_ns=r.records(topic)[number].time_ns - 3600 * 10**9)


def drop_a_graded_member_at_its_deadline(r: Recorded) -> None:
    long_before(r, r.messages(BATCH_PACKED)[r.batch(5)].groups[1].prompt_id)
    drop_a_healthy_member(r, "deadline")


def drop_a_graded_group_at_its_deadline(r: Recorded) -> None:
    long_before(r, r.messages(BATCH_PACKED)[r.batch(5)].groups[1].prompt_id)
    drop_a_healthy_group(r, "deadline")


def drop_a_healthy_group(r: Recorded, reason: str) -> None:
    at = r.batch(5)
    name = r.messages(BATCH_PACKED)[at].groups[1].prompt_id
    r.alter(BATCH_PACKED, at, remove_group)
    r.add(GROUP_DROPPED, GroupDropped(name, reason), at=r.places(BATCH_PACKED)[at])
    r.train_again(5)


def skip(r: Recorded) -> None:
    """The last step was passed over, as its record has it."""
    r.alter(BATCH_TRAINED, -1, lags={}, masked=0, skipped=True)


def skip_and_train(r: Recorded) -> None:
    """As an operator asked, and yet its tokens were trained."""
    ask(r, SKIP_REQUESTED, SkipRequested(STEPS))
    r.alter(BATCH_TRAINED, -1, skipped=True)


def ask(r: Recorded, topic: Topic[Any], request: Message) -> None:
    """Put the request of an operator behind all others."""
    log = r.logs[ACTORS.name]
    newest = log[-1]._replace(sequence=log[-1].sequence + 1, subject=topic.subject(r.run), headers={})
    log.append(newest._replace(data=encode(request)))


def issue_again(r: Recorded, asked: str, issued: str) -> None:
    """The group of a request, which is dropped."""
    if asked:
        ask(r, REISSUE_REQUESTED, ReissueRequested(asked))
    last = r.messages(PROMPT_ISSUED)[-1]
    for member in range(last.group_size):
        again = msgspec.structs.replace(last, prompt_id="r000000", member=member, origin=issued)
        r.add(PROMPT_ISSUED, again)


CORRUPTIONS: dict[str, tuple[Callable[[Recorded], object], str]] = {
    "a group lost by the buffer": (lose_group, "left over"),
    "a member lost by the buffer": (lose_member, "no end"),
    "half of the tokens not trained": (train_half, "fewer tokens than sampled"),
    "tokens masked that nobody sampled": (
        lambda r: r.alter(BATCH_TRAINED, -1, masked=r.messages(BATCH_TRAINED)[-1].masked + 77),
        "more tokens than sampled",
    ),
    "tokens from nowhere": (train_more, "more tokens than sampled"),
    "a bound too narrow": (narrow_bound, "wrong bound"),
    "a bound too wide": (widen_bound, "beyond lag bound"),
    "a token too old": (lambda r: r.alter(BATCH_TRAINED, -1, lags={9: 1}), "beyond lag bound"),
    "a batch by a writer that never claimed the log": (unclaimed_writer, "foreign writer"),
    "a log that nobody claimed": (unclaimed_log, "foreign writer"),
    "steps by a deposed writer": (deposed_writer, "foreign writer"),
    "a checkpoint of other weights": (lambda r: r.alter(CHECKPOINT_SAVED, -1, digest="d" * 32), "wrong checkpoint"),
    "a checkpoint of a later step": (
        lambda r: r.add(CHECKPOINT_SAVED, CheckpointSaved(0, 9, "d" * 32, "there", 99)),
        "wrong checkpoint",
    ),
    "a checkpoint on a lineage that never was": (save_on_no_line, "unknown lineage"),
    "a step on a lineage that never was": (lambda r: r.alter(BATCH_TRAINED, -1, lineage=3), "unknown lineage"),
    "a batch of RL renamed": (rename_stage, "wrong stage"),
    "an issue of another stage": (issue_for_the_warmup, "wrong stage"),
    "another bound when it was opened again": (open_again, "bound changed"),
    "a step replaced by garbage": (lambda r: r.replace(BATCH_TRAINED, -1, data=b"garbage"), "unreadable record"),
    "a batch replaced by garbage": (lambda r: r.replace(BATCH_PACKED, -1, data=b"garbage"), "unreadable record"),
    "an issue with other headers": (
        lambda r: r.replace(PROMPT_ISSUED, 3, headers={"writer": "x"}),
        "unreadable record",
    ),
    "a grade after its batch": (grade_late, "graded late"),
    "a second grade instead of the first": (grade_before, "second grade"),
    "a grade after a failure": (fail_before, "second grade"),
    "more tokens of a member": (lambda r: r.alter(BATCH_PACKED, r.batch(6), more_tokens_of_a_member), "wrong tokens"),
    "another length of a member": (lambda r: r.alter(BATCH_PACKED, r.batch(6), another_length), "wrong tokens"),
    "lengths that the result does not have": (other_lengths, "wrong tokens"),
    "another learning rate": (lambda r: r.alter(BATCH_PACKED, r.batch(6), another_rate), "wrong objective"),
    "another loss in the warm-up": (
        lambda r: r.alter(BATCH_PACKED, 0, lambda packed: setattr(packed, "objective", Objective())),
        "wrong objective",
    ),
    "a reward that nobody gave": (lambda r: r.alter(BATCH_PACKED, r.batch(6), another_reward), "not graded"),
    "other statistics of the rewards": (lambda r: r.alter(BATCH_TRAINED, -1, rewards=[2.0, 0.0]), "wrong rewards"),
    "a version without training": (invent_version, "untrained version"),
    "a version with two digests": (publish_otherwise, "two digests"),
    "a version that is missing": (unpublish, "unpublished version"),
    "an attempt issued twice": (lambda r: r.add(PROMPT_ISSUED, r.messages(PROMPT_ISSUED)[20]), "issued twice"),
    "a prompt left out": (leave_out, "left out"),
    "an issue that is missing": (lambda r: r.remove(PROMPT_ISSUED, 20), "never issued"),
    "a trained trajectory dropped": (drop, "ended twice"),
    "a trained group dropped": (lambda r: r.add(GROUP_DROPPED, GroupDropped("p000001", "lag")), "ended twice"),
    "a group in two batches": (pack_again, "in two batches"),
    "a result twice": (lambda r: repeat_last(r, TRAJECTORY_GENERATED), "generated twice"),
    "a probability in place of a log-prob": (probabilities, "damaged payload"),
    "the tokens of others": (swap_results, "wrong reference"),
    "a flipped byte": (lambda r: r.alter(TRAJECTORY_GENERATED, -1, completion="?"), "damaged payload"),
    "a batch packed twice": (lambda r: repeat_last(r, BATCH_PACKED), "packed twice"),
    "a step trained twice": (lambda r: repeat_last(r, BATCH_TRAINED), "trained twice"),
    "a step left out": (lambda r: r.remove(BATCH_TRAINED, 6), "step out of order"),
    "another batch trained": (lambda r: r.alter(BATCH_TRAINED, -1, batch_sequence=3), "wrong batch"),
    "another row of one member": (another_row, "wrong row"),
    "a result graded against another row": (graded_against_another_row, "wrong row"),
    "a group without a row": (no_row, "wrong row"),
    "another order of the data": (another_order, "wrong row"),
    "a prompt issued again that nobody asked for": (lambda r: issue_again(r, "", "p000003"), "wrong origin"),
    "another prompt issued again than was asked for": (lambda r: issue_again(r, "p000002", "p000003"), "wrong origin"),
    "an end before the last step": (lambda r: r.alter(TRAINING_FINISHED, -1, step=STEPS - 1), "step out of order"),
    "a seed of its own": (lambda r: r.alter(PROMPT_ISSUED, -1, seed=1), "wrong seed"),
    "a batch with a group less": (lose_group, "wrong size"),
    "a healthy member dropped as failed": (lambda r: drop_a_healthy_member(r, "rollout"), "dropped without cause"),
    "a healthy member dropped for its age": (lambda r: drop_a_healthy_member(r, "lag"), "dropped without cause"),
    "a healthy member dropped as surplus": (lambda r: drop_a_healthy_member(r, "surplus"), "dropped without cause"),
    "a member dropped before its deadline": (lambda r: drop_a_healthy_member(r, "deadline"), "dropped without cause"),
    "a healthy group dropped as failed": (lambda r: drop_a_healthy_group(r, "failed"), "dropped without cause"),
    "a healthy group dropped for its age": (lambda r: drop_a_healthy_group(r, "lag"), "dropped without cause"),
    "a healthy group dropped too early": (lambda r: drop_a_healthy_group(r, "deadline"), "dropped without cause"),
    "a graded member dropped at its deadline": (drop_a_graded_member_at_its_deadline, "dropped without cause"),
    "a graded group dropped at its deadline": (drop_a_graded_group_at_its_deadline, "dropped without cause"),
    "a group dropped as flat": (lambda r: drop_a_healthy_group(r, "zero_variance"), "dropped without cause"),
    "a batch passed over that nobody asked to skip": (skip, "unasked skip"),
    "tokens trained of a batch that was passed over": (skip_and_train, "more tokens than sampled"),
    "an engine with other weights": (lambda r: r.alter(ENGINE_READY, -1, digest="d" * 32), "foreign weights"),
    "a version older than asked for": (raise_min_version, "below min_version"),
}
