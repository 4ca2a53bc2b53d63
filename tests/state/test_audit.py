"""The audit finds every planted corruption, and nothing where nothing is wrong; explain tells a life."""

from itertools import permutations

import msgspec
import pytest

from asyncrl.bus.publish import publish
from asyncrl.cli.audit import findings_text
from asyncrl.config.settings import Config
from asyncrl.state.audit.audit import Queue
from asyncrl.state.audit.reading import Audited, audit_run
from asyncrl.training.objective import objective_of
from harness.ordinary_run import SETTINGS, ordinary_story
from harness.runs import command
from harness.stories import FIRST, LOGS, Story, result
from topics.actors import DeadLetter
from topics.batches import BATCH_PACKED, BATCH_TRAINED, BatchGroup, BatchMember, BatchPacked
from topics.groups import GroupDropped
from topics.topic import TRAJECTORIES
from topics.trajectories import TRAJECTORY_DROPPED, TRAJECTORY_GENERATED, TRAJECTORY_GRADED
from topics.weights import CHECKPOINT_SAVED, WEIGHTS_PUBLISHED, WeightsPublished


def test_a_run_in_which_nothing_is_wrong_is_clean():
    findings = ordinary_story().findings(deep=True, queues={"rollout": Queue(10), "reward": Queue(6)})

    assert findings.violations == []
    assert (findings.prompts, findings.issued, findings.trained, findings.packed) == (6, 11, 5, 1)
    assert findings.dropped == {"failed": 2, "rollout": 1}
    assert findings.open == {"rollout": 1, "reward": 1}
    assert (findings.batches, findings.trained_batches, findings.versions) == (4, 3, 3)
    assert findings.tokens_by_lag == {-1: 3, 0: 10, 1: 2}


def test_of_a_run_that_only_serves_the_audit_tells_what_it_compared():
    story = Story()
    story.publish(WeightsPublished(0, 0, "d", "files", ""))

    name, compared, *rows = findings_text(Audited("chat", story.findings(), {}, [])).splitlines()

    assert (name, rows) == ("run chat: clean", ["      versions  1 published", "    unreadable  0 messages"])
    assert compared.strip().startswith("compared  versions with the engines that took them")


def test_the_order_between_logs_does_not_matter():
    story = ordinary_story()
    story.trained(2, 9)  # and neither does it where something is wrong
    for logs in permutations(LOGS[len(FIRST) :]):
        assert story.wrong(logs=(*FIRST, *logs)) == [("trained twice", "batch 2")]


# --- one corruption at a time: what is done to the run, and what the audit says


def two_rewards(story):
    batch = story.messages(BATCH_PACKED)[1]
    batch.groups[0].members[0].reward = 0.5


def a_member_too_many(story):
    story.issued("p000005-0")
    story.graded("p000005-0")
    grade = story.messages(TRAJECTORY_GRADED)[-1]
    member = BatchMember("p000005-0", 0, grade.payload, grade.reward, 3, lengths=grade.lengths)
    story.messages(BATCH_PACKED)[3].groups.append(BatchGroup("p000001", [member]))


def other_rules(story):
    group = story.messages(BATCH_PACKED)[3].groups[0]
    group.temperature, group.estimator = 0.5, "grpo"


CORRUPTIONS = {
    "a group of other rules than those it was issued with": (other_rules, ("wrong rules", "p000003")),
    "a trajectory issued twice": (lambda s: s.issued("p000000-0"), ("issued twice", "p000000-0")),
    "a prompt left out": (lambda s: s.issued("p000006-0"), ("left out", "p000005")),
    "a member left out": (
        lambda s: (s.issued("p000005-1"), s.issued("p000006-0")),
        ("left out", "p000005"),
    ),
    "an end of nothing": (lambda s: s.dropped("p000077-0"), ("never issued", "p000077-0")),
    "an end of another attempt": (
        lambda s: s.dropped("p000003-0", attempt=1),
        ("ended twice", "p000003-0 (attempt 1)"),
    ),
    "a group of nothing": (
        lambda s: s.publish(GroupDropped("p000077", "deadline")),
        ("never issued", "p000077"),
    ),
    "a trained trajectory dropped": (lambda s: s.dropped("p000000-1"), ("ended twice", "p000000-1")),
    "a trained group dropped": (
        lambda s: s.publish(GroupDropped("p000000", "lag")),
        ("ended twice", "p000000"),
    ),
    "a group dropped twice": (
        lambda s: s.publish(GroupDropped("p000002", "failed")),
        ("ended twice", "p000002"),
    ),
    "a trajectory in two batches": (lambda s: s.packed(4, "p000000-0"), ("in two batches", "p000000-0")),
    "a group in two batches": (a_member_too_many, ("in two batches", "p000001"), ("wrong size", "batch 3")),
    "an end that is missing": (lambda s: s.unsay(TRAJECTORY_DROPPED, 0), ("no end", "p000003-0")),
    "tokens trimmed too early": (lambda s: s.unsay(TRAJECTORY_GENERATED, 5), ("lost", "p000003-1")),
    "a second result": (lambda s: s.generated("p000004-0", (2,)), ("generated twice", "p000004-0")),
    "a reward nobody gave": (two_rewards, ("not graded", "p000000-0")),
    "a grade that is missing": (lambda s: s.unsay(TRAJECTORY_GRADED, 5), ("not graded", "p000003-1")),
    "somebody else's tokens": (
        lambda s: s.alter(TRAJECTORY_GENERATED, 1, trajectory_id="p000008-0"),
        ("wrong reference", "p000000-0"),
    ),
    "a flipped byte": (lambda s: s.alter(TRAJECTORY_GENERATED, 2, completion="?"), ("damaged payload", "p000000-1")),
    "tokens of other versions than the header says": (
        lambda s: s.alter(TRAJECTORY_GENERATED, 6, segments=result("p000004-0", (1, 2)).segments),
        ("damaged payload", "p000004-0"),
    ),
    "a step packed twice": (lambda s: s.packed(3, "p000000-0"), ("packed twice", "batch 3")),
    "a step left out by the buffer": (
        lambda s: s.packed(5),
        ("step out of order", "batch 5"),
        ("wrong size", "batch 5"),
    ),
    "a step trained twice": (lambda s: s.trained(2, 9), ("trained twice", "batch 2")),
    "a step left out by the learner": (
        lambda s: s.unsay(BATCH_TRAINED, 1),
        ("untrained version", "version 1 of lineage 0"),
        ("wrong checkpoint", "checkpoint of step 1 on lineage 0"),
        ("step out of order", "batch 2"),
    ),
    "a first step left out": (
        lambda s: s.unsay(BATCH_TRAINED, 0),
        ("untrained version", "version 0 of lineage 0"),
        ("step out of order", "batch 1"),
    ),
    "training of no batch": (lambda s: s.trained(3, 77, 1, {0: 1, 1: 2}), ("wrong batch", "batch 3")),
    "a checkpoint of another batch": (
        lambda s: s.alter(CHECKPOINT_SAVED, 0, batch_sequence=1),
        ("wrong batch", "batch 1"),
    ),
    "a trajectory too many": (lambda s: s.alter(BATCH_TRAINED, 1, trajectories=3), ("wrong batch", "batch 1")),
    "a token too old": (lambda s: s.alter(BATCH_TRAINED, 2, lags={0: 4, 2: 2}), ("beyond lag bound", "batch 2")),
    "a bound too wide": (lambda s: s.alter(BATCH_PACKED, 1, min_version=-2), ("beyond lag bound", "batch 1")),
    "tokens from nowhere": (
        lambda s: s.alter(BATCH_TRAINED, 2, lags={0: 5, 1: 2}),
        ("more tokens than sampled", "batch 2"),
    ),
    "a version that is missing": (lambda s: s.unsay(WEIGHTS_PUBLISHED, 2), ("unpublished version", "p000003-1")),
    "a batch trained and saved before it was packed": (
        lambda s: s.times.update({("batch.packed", 1): 1}),
        ("step out of order", "batch 1"),
        ("step out of order", "batch 1"),
    ),
    "a step that changed no weights, which no message announced": (
        lambda s: s.alter(WEIGHTS_PUBLISHED, 2, digest="0-1"),
        ("repeated version", "version 2 of lineage 0"),
    ),
    "a version said twice": (
        lambda s: s.published(1, digest="other"),
        ("two digests", "version 1 of lineage 0"),
    ),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_planted_corruption_is_named_and_nothing_else(corruption):
    corrupt, *expected = CORRUPTIONS[corruption]
    story = ordinary_story()

    corrupt(story)

    assert story.wrong(deep=True) == expected


def test_work_acknowledged_without_a_result_is_lost():
    story = ordinary_story()

    assert story.wrong(queues={"rollout": Queue(12)}) == [("lost", "p000004-1")]
    assert story.wrong(queues={"reward": Queue(7)}) == [("lost", "p000004-0")]

    story.publish(DeadLetter("prompt.issued", "PROMPTS", 12, "unreadable", {}, b""))
    assert story.wrong(queues={"rollout": Queue(12)}) == []
    assert story.wrong(queues={"rollout": Queue(12)}, legible=[("PROMPTS", 12)]) == [("hidden loss", "p000004-1")]


def test_a_queue_that_holds_less_than_what_is_open_has_lost_some_of_it():
    story = ordinary_story()  # of two that are open, one is sampled and one is graded

    rollout, reward = Queue(9, delivered=12, newest=12), Queue(5, delivered=5, newest=7)
    assert story.wrong(queues={"rollout": rollout}) == [("lost", "queue rollout")]
    assert story.wrong(queues={"rollout": rollout._replace(waiting=9)}) == [("lost", "queue rollout")]  # later messages
    assert story.wrong(queues={"rollout": rollout._replace(unacknowledged=1)}) == []
    assert story.wrong(queues={"rollout": rollout._replace(newest=11)}) == []  # issued since
    assert story.wrong(queues={"reward": reward}) == [("lost", "queue reward")]
    assert story.wrong(queues={"reward": reward._replace(unacknowledged=9)}) == [("lost", "queue reward")]
    assert story.wrong(queues={"reward": reward._replace(waiting=1)}) == []


# --- on a real server


WRITER = {"writer": "story"}


async def tell(story, bus):
    """Say a story on the topics of a run."""
    for log in story.logs.values():
        for topic, message in log:
            await publish(bus, message, topic=topic, headers=WRITER)


async def test_a_run_is_audited_and_explained_from_its_topics(bus, server, tmp_path):
    await tell(ordinary_story(), bus)
    await bus.store(TRAJECTORY_GRADED.subject(bus.run, "p000001-1"), b"garbage", {})
    audited = await audit_run(bus, deep=True)
    findings = audited.findings
    assert findings.violations == []
    assert (findings.trained, findings.payloads, findings.unreadable) == (5, 7, 1)
    assert (audited.queues["rollout"].newest, audited.queues["rollout"].waiting) == (12, 11)

    (tmp_path / "password").write_text(server.address.password)
    at = ["--url", server.address.url, "--user", server.address.user, "--password-file", str(tmp_path / "password")]
    code, output = await command(tmp_path, "audit", bus.run, *at)
    assert (code, output.splitlines()[0]) == (0, f"run {bus.run}: clean")

    for step in range(4, 34):  # thirty empty batches, and one left out before each
        objective = objective_of(msgspec.convert(SETTINGS, Config), 2 * step)
        await publish(bus, BatchPacked(2 * step, "rl", [], 2 * step - 2, objective), headers=WRITER)
    code, output = await command(tmp_path, "audit", bus.run, *at)
    assert (code, output.splitlines()[0]) == (1, f"run {bus.run}: 60 violations")
    assert "step out of order: batch 8: found packed after batch 3; expected batch 4" in output
    assert output.count("step out of order: batch") == 20
    assert output.endswith("... and 40 more\n")

    code, output = await command(tmp_path, "explain", bus.run, "p000001-1", *at)
    assert code == 0
    life, text = output.split("\n\n", 1)
    whats = [lineage.split()[2] for lineage in life.splitlines()[1:]]
    assert sorted(whats) == ["generated", "graded", "issued", "packed", "trained", "unreadable"]
    assert text.startswith("p000001-1  3 tokens")
    assert "reward 0" in output
    assert "batch 2 on lineage 0, in version 2" in output
    code, output = await command(tmp_path, "explain", bus.run, "p000099-1", *at)
    assert (code, output) == (1, f"run {bus.run}: there is no message about a trajectory p000099-1\n")
    code, output = await command(tmp_path, "explain", bus.run, "p000001", *at)
    assert code == 2
    await bus.api(f"STREAM.PURGE.{TRAJECTORIES.full_name(bus.run)}", {})
    code, output = await command(tmp_path, "explain", bus.run, "p000001-1", *at)
    assert (code, "generated" in output) == (0, False), output
    assert output.endswith("its tokens were trimmed: no longer stored\n"), output
