"""Everything that can be wrong with a real run is found by its name, and nothing is found where nothing is wrong."""

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded import Recorded
from runs import address_of, command, up

from asyncrl.bus.connection import Bus
from asyncrl.cli.audit import audit_run
from asyncrl.cli.reach import opened
from asyncrl.ledger.open_work import Queue
from topics.actors import (
    DEAD_LETTER,
    REISSUE_REQUESTED,
    RUN_OPENED,
    SKIP_REQUESTED,
    DeadLetter,
    KeeperBeat,
    ReissueRequested,
    SkipRequested,
)
from topics.batches import BATCH_PACKED, BATCH_TRAINED
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
)
from topics.weights import CHECKPOINT_SAVED, TRAINING_FINISHED, WEIGHTS_PUBLISHED, CheckpointSaved, WeightsPublished
from topics.wire import Message, encode

pytestmark = pytest.mark.slow
STEPS = 8
MIDDLE = 3  # the batch that the run in the middle has packed last


class Finished:
    """A run that has ended, and what audits found while it went on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.live: list[str] = []  # what each audit of the live run found
        self.recorded: Recorded

    async def run(self) -> None:
        async with up(self.folder, f"learner.steps={STEPS}", "nats.keep=run") as run:
            await run.reaches(run.steps, "the first step", 120)
            bus = await Bus.connect(address_of(run), "short")
            base = Path((run.root / "base").read_text())
            while run.process.returncode is None and len(run.steps()) < STEPS - 1:
                self.live += [str(found) for found in (await audit_run(bus, deep=True, base=base)).findings.violations]
            await bus.close()
            assert await run.ended() == 0, run.story
        async with opened(run.root, "test") as bus:
            self.recorded = await Recorded.read(bus, base)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    made = Finished(tmp_path_factory.mktemp("finished"))
    asyncio.run(made.run())
    return made


@pytest.fixture
def whole(finished: Finished) -> Recorded:
    """The finished run."""
    return finished.recorded.copy()


@pytest.fixture
def middle(finished: Finished) -> Recorded:
    """The run when it had just issued something after a batch of RL."""
    recorded = finished.recorded
    packed_ns = recorded.records(BATCH_PACKED)[recorded.batch(MIDDLE)].time_ns
    return recorded.until(next(r.time_ns for r in recorded.records(PROMPT_ISSUED) if r.time_ns > packed_ns))


# --- nothing is wrong


async def test_a_run_is_clean_while_it_goes_on_and_when_it_has_ended(finished: Finished):
    assert finished.live == []
    code, said = await command(finished.folder, "audit", "short", "--deep")
    assert code == 0, said
    assert "run short: clean" in said.splitlines()
    assert "not compared" not in said
    rows = dict(line.split(maxsplit=1) for line in said.splitlines()[1:])
    issued, trained, dropped = (int(rows[name].split()[0]) for name in ("issued", "trained", "dropped"))
    assert issued == trained + dropped >= STEPS * 8 * 4 + 4 * 2
    assert rows["open"] == "0"
    assert rows["batches"].startswith(f"{STEPS + 4} packed, {STEPS + 4} trained")
    code, said = await command(finished.folder, "explain", "short", "p000000-0")
    assert code == 0, said
    whats = [line.split()[2] for line in said.split("\n\n")[0].splitlines()[1:]]
    assert whats == ["issued", "generated", "graded", "packed", "trained"]


def test_its_messages_are_clean_at_every_moment(finished: Finished):
    recorded = finished.recorded
    assert recorded.findings().violations == []
    moments = [record.time_ns for topic in (BATCH_PACKED, BATCH_TRAINED) for record in recorded.records(topic)]
    assert [recorded.until(moment).findings().violations for moment in moments] == [[]] * len(moments)


# --- one corruption at a time: what is done to the finished run, and what the audit calls it


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


def grade_before(r: Recorded) -> None:
    """Somebody graded it before, and otherwise; the batch holds the second grade."""
    number = len(r.messages(TRAJECTORY_GRADED)) // 2
    first = r.messages(TRAJECTORY_GRADED)[number]
    at = r.places(TRAJECTORY_GRADED)[number]
    r.add(TRAJECTORY_GRADED, msgspec.structs.replace(first, reward=first.reward - 0.25), at=at)


def fail_before(r: Recorded) -> None:
    grade = r.messages(TRAJECTORY_GRADED)[-1]
    failed = BY_NAME["trajectory.failed"]
    fields = {name: getattr(grade, name) for name in ("trajectory_id", "prompt_id", "member", "group_size", "stage")}
    r.add(failed, failed.message(**fields, reason="rollout", detail=""), at=r.places(TRAJECTORY_GRADED)[-1])


def more_tokens_of_a_member(packed):
    packed.groups[0].members[0].tokens += 1


def another_reward(packed):
    packed.groups[0].members[0].reward += 0.125


def invent_version(r: Recorded) -> None:
    r.add(WEIGHTS_PUBLISHED, WeightsPublished(0, 42, "d" * 32, "files", "line0-v000042"))


def say_otherwise(r: Recorded) -> None:
    r.add(WEIGHTS_PUBLISHED, msgspec.structs.replace(r.messages(WEIGHTS_PUBLISHED)[3], digest="d" * 32))


def save_on_no_line(r: Recorded) -> None:
    saved = r.messages(CHECKPOINT_SAVED)[-1]
    r.add(CHECKPOINT_SAVED, msgspec.structs.replace(saved, line=5))


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


def drop(r: Recorded) -> None:
    r.add(TRAJECTORY_DROPPED, TrajectoryDropped(trajectory_id="p000001-1", attempt=0, reason="lag"))


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
    r.remove(WEIGHTS_PUBLISHED, lambda message: message.version == 3)


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
        lambda r: r.alter(BATCH_TRAINED, -1, masked=77),
        "more tokens than sampled",
    ),
    "tokens from nowhere": (train_more, "more tokens than sampled"),
    "a bound too narrow": (narrow_bound, "wrong bound"),
    "a bound too wide": (widen_bound, "beyond lag bound"),
    "a token too old": (lambda r: r.alter(BATCH_TRAINED, -1, lags={9: 1}), "beyond lag bound"),
    "a batch by a writer that never claimed the log": (unclaimed_writer, "foreign writer"),
    "a log that nobody claimed": (unclaimed_log, "foreign writer"),
    "steps by a deposed writer": (deposed_writer, "foreign writer"),
    "a checkpoint of other weights": (
        lambda r: r.alter(CHECKPOINT_SAVED, -1, digest="d" * 32),
        "wrong checkpoint",
    ),
    "a checkpoint of a later step": (
        lambda r: r.add(CHECKPOINT_SAVED, CheckpointSaved(0, 9, "d" * 32, "there", 99)),
        "wrong checkpoint",
    ),
    "a checkpoint on a line that never was": (save_on_no_line, "unknown line"),
    "a step on a line that never was": (lambda r: r.alter(BATCH_TRAINED, -1, line=3), "unknown line"),
    "a batch of RL renamed": (rename_stage, "wrong stage"),
    "an issue of another stage": (issue_for_the_warmup, "wrong stage"),
    "another bound when it was opened again": (open_again, "bound changed"),
    "a step replaced by garbage": (
        lambda r: r.replace(BATCH_TRAINED, -1, data=b"garbage"),
        "unreadable record",
    ),
    "a batch replaced by garbage": (
        lambda r: r.replace(BATCH_PACKED, -1, data=b"garbage"),
        "unreadable record",
    ),
    "an issue with other headers": (
        lambda r: r.replace(PROMPT_ISSUED, 3, headers={"writer": "x"}),
        "unreadable record",
    ),
    "a grade after its batch": (grade_late, "graded late"),
    "a second grade instead of the first": (grade_before, "second grade"),
    "a grade after a failure": (fail_before, "second grade"),
    "another number of tokens of a member": (
        lambda r: r.alter(BATCH_PACKED, r.batch(6), more_tokens_of_a_member),
        "wrong tokens",
    ),
    "a reward that nobody gave": (lambda r: r.alter(BATCH_PACKED, r.batch(6), another_reward), "not graded"),
    "other statistics of the rewards": (lambda r: r.alter(BATCH_TRAINED, -1, rewards=[2.0, 0.0]), "wrong rewards"),
    "a version without training": (invent_version, "untrained version"),
    "a version with two digests": (say_otherwise, "two digests"),
    "a version that is missing": (unpublish, "unpublished version"),
    "an attempt issued twice": (
        lambda r: r.add(PROMPT_ISSUED, r.messages(PROMPT_ISSUED)[20]),
        "issued twice",
    ),
    "a prompt left out": (leave_out, "left out"),
    "an issue that is missing": (lambda r: r.remove(PROMPT_ISSUED, 20), "never issued"),
    "a trained trajectory dropped": (drop, "ended twice"),
    "a trained group dropped": (lambda r: r.add(GROUP_DROPPED, GroupDropped("p000001", "lag")), "ended twice"),
    "a group in two batches": (pack_again, "in two batches"),
    "a result twice": (
        lambda r: r.add(TRAJECTORY_GENERATED, r.messages(TRAJECTORY_GENERATED)[-1]),
        "generated twice",
    ),
    "the tokens of others": (swap_results, "wrong reference"),
    "a flipped byte": (lambda r: r.alter(TRAJECTORY_GENERATED, -1, completion="?"), "damaged payload"),
    "a batch packed twice": (lambda r: r.add(BATCH_PACKED, r.messages(BATCH_PACKED)[-1]), "packed twice"),
    "a step trained twice": (lambda r: r.add(BATCH_TRAINED, r.messages(BATCH_TRAINED)[-1]), "trained twice"),
    "a step left out": (lambda r: r.remove(BATCH_TRAINED, 6), "step out of order"),
    "another batch trained": (lambda r: r.alter(BATCH_TRAINED, -1, batch_sequence=3), "wrong batch"),
    "another row of one member": (another_row, "wrong row"),
    "a result graded against another row": (graded_against_another_row, "wrong row"),
    "a group without a row": (no_row, "wrong row"),
    "another order of the data": (another_order, "wrong row"),
    "a prompt issued again that nobody asked for": (lambda r: issue_again(r, "", "p000003"), "wrong origin"),
    "another prompt issued again than was asked for": (
        lambda r: issue_again(r, "p000002", "p000003"),
        "wrong origin",
    ),
    "an end before the last step": (
        lambda r: r.alter(TRAINING_FINISHED, -1, step=STEPS - 1),
        "step out of order",
    ),
    "a seed of its own": (lambda r: r.alter(PROMPT_ISSUED, -1, seed=1), "wrong seed"),
    "a batch with a group less": (lose_group, "wrong size"),
    "a healthy member dropped as failed": (lambda r: drop_a_healthy_member(r, "rollout"), "dropped without cause"),
    "a healthy member dropped for its age": (lambda r: drop_a_healthy_member(r, "lag"), "dropped without cause"),
    "a healthy member dropped before its deadline": (
        lambda r: drop_a_healthy_member(r, "deadline"),
        "dropped without cause",
    ),
    "a healthy group dropped as failed": (lambda r: drop_a_healthy_group(r, "failed"), "dropped without cause"),
    "a healthy group dropped for its age": (lambda r: drop_a_healthy_group(r, "lag"), "dropped without cause"),
    "a healthy group dropped before its deadline": (
        lambda r: drop_a_healthy_group(r, "deadline"),
        "dropped without cause",
    ),
    "a graded member dropped at its deadline": (drop_a_graded_member_at_its_deadline, "dropped without cause"),
    "a graded group dropped at its deadline": (drop_a_graded_group_at_its_deadline, "dropped without cause"),
    "a group dropped as flat": (lambda r: drop_a_healthy_group(r, "zero_variance"), "dropped without cause"),
    "a batch passed over that nobody asked to skip": (skip, "unasked skip"),
    "tokens trained of a batch that was passed over": (skip_and_train, "more tokens than sampled"),
    "an engine that sampled from other weights": (
        lambda r: r.alter(ENGINE_READY, -1, digest="d" * 32),
        "foreign weights",
    ),
    "a version older than asked for": (raise_min_version, "below min_version"),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_corruption_of_the_finished_run_is_found_by_its_name(whole: Recorded, corruption: str):
    corrupt, kind = CORRUPTIONS[corruption]

    corrupt(whole)

    assert kind in whole.kinds()


# --- and of the run in the middle, where work is open


def everything_acknowledged(r: Recorded) -> dict[str, Queue]:
    return {"rollout": Queue(r.records(PROMPT_ISSUED)[-1].sequence), "reward": Queue(10**9)}


def letters(r: Recorded, reason: str) -> None:
    """Every issue has a dead letter."""
    log = [*r.records(PROMPT_ISSUED), *r.records(TRAJECTORY_GENERATED)]
    for number, record in enumerate(log, 1):
        letter = DeadLetter("any", record.stream.name, record.sequence, reason, {}, b"")
        subject = DEAD_LETTER.subject(r.run, letter.place)
        body = encode(letter)
        r.logs["DEAD"].append(
            record._replace(stream=DEAD_LETTER.stream, sequence=number, subject=subject, data=body, headers={})
        )


def test_work_that_was_acknowledged_before_anything_came_of_it_is_lost(middle: Recorded):
    assert middle.kinds(queues=everything_acknowledged(middle)) == {"lost"}


def test_tokens_that_are_gone_before_a_checkpoint_has_them_are_lost(middle: Recorded):
    middle.remove(TRAJECTORY_GENERATED, -1)

    assert middle.kinds() == {"lost"}


def test_a_dead_letter_hides_no_loss(middle: Recorded):
    letters(middle, "not a PromptIssued: truncated")
    assert middle.kinds(queues=everything_acknowledged(middle)) == {"hidden loss"}


def test_poison_is_excused_until_its_deadline_and_no_longer(middle: Recorded):
    letters(middle, "poison: 5 deliveries")
    assert middle.kinds(queues=everything_acknowledged(middle)) == set()

    middle.add(BY_NAME["buffer.beat"], KeeperBeat("0"))
    deadline_ns = int((middle.cast.buffer.group_deadline_s + 60) * 1e9)
    middle.logs["BATCHES"][-1] = middle.logs["BATCHES"][-1]._replace(
        time_ns=middle.logs["BATCHES"][-1].time_ns + deadline_ns
    )
    assert middle.kinds(queues=everything_acknowledged(middle)) == {"overdue"}


def test_a_queue_that_may_lose_something_is_named(middle: Recorded):
    [found] = middle.findings(queues={"rollout": Queue(0, fault="max_deliver = 5")}).violations

    assert (found.kind, found.id, found.found) == ("wrong queue", "queue rollout", "max_deliver = 5")


def test_a_complete_group_that_later_batches_pass_over_is_left_over(finished: Finished):
    recorded = finished.recorded.until(finished.recorded.records(BATCH_TRAINED)[-2].time_ns)
    lose_group_of_the_first_batch(recorded)

    assert recorded.kinds() == {"left over", "wrong size"}


def lose_group_of_the_first_batch(r: Recorded) -> None:
    r.alter(BATCH_PACKED, r.batch(1), remove_group)
    r.train_again(1)
