"""Unusual histories that are right: the audit finds nothing there, and the violation beside it."""

import pytest

from harness.ordinary_run import SETTINGS, ordinary_story
from harness.stories import Story
from topics.actors import RUN_OPENED, RunOpened, SkipRequested
from topics.batches import BATCH_PACKED, BATCH_TRAINED, BatchMember
from topics.engines import EngineReady
from topics.evals import EvalRequested, EvalScored
from topics.promotions import (
    WEIGHTS_PROMOTED,
    PromotionRequested,
    WeightsCanaried,
    WeightsPromoted,
)
from topics.prompts import PROMPT_ISSUED
from topics.secrets import PurgeRequested
from topics.streams import StreamTrimming
from topics.trajectories import TRAJECTORY_GENERATED, TRAJECTORY_GRADED
from topics.weights import (
    CHECKPOINT_SAVED,
    UNTRAINED,
    WEIGHTS_PUBLISHED,
    CheckpointRestored,
    CheckpointSaved,
    WeightsPublished,
)


def test_a_step_trained_again_on_a_newer_line_counts_once():
    story = ordinary_story()
    sequence = story.messages(BATCH_TRAINED)[1].batch_sequence
    story.published(1, lineage=1)
    story.trained(1, sequence, lineage=1)
    assert story.wrong() == []
    assert story.findings().trained_batches == 2  # what lineage 0 trained after it is in no weights

    story.trained(2, story.messages(BATCH_TRAINED)[2].batch_sequence, lags={0: 4, 1: 2}, lineage=1)
    findings = story.findings()
    assert findings.violations == []
    assert (findings.trained_batches, findings.trained) == (3, 5)

    story.trained(1, sequence, lineage=0)
    assert story.wrong() == [("trained twice", "batch 1")]


def test_a_checkpoint_of_a_step_that_is_trained_again_has_the_lineage_that_is_published_later():
    story = ordinary_story()
    sequence = story.messages(BATCH_TRAINED)[1].batch_sequence
    story.publish(CheckpointSaved(1, 1, "f" * 32, "/there", sequence))
    assert story.wrong() == []
    story.published(2, lineage=1)
    version = story.messages(WEIGHTS_PUBLISHED)[1]
    story.publish(CheckpointSaved(1, version.version, version.digest, "/there too", sequence))  # as lineage 0 had it
    assert story.wrong() == []

    story.publish(CheckpointSaved(1, 1, "e" * 32, "/elsewhere", sequence))
    assert story.wrong() == [("wrong checkpoint", "checkpoint of step 1 on lineage 1")]


def test_a_trajectory_issued_again_has_an_end_for_each_attempt():
    story = ordinary_story()
    story.graded("p000004-1")
    story.dropped("p000004-1", "lag")
    story.issued("p000004-1", attempt=1)
    assert story.wrong() == []
    assert story.findings().open == {"rollout": 1, "reward": 1}

    story.graded("p000004-1", (1, 1, 1), attempt=1)
    story.dropped("p000004-1", "lag", attempt=1)
    story.dropped("p000004-1", "deadline", attempt=2)  # before it was issued a third time
    assert story.wrong() == []
    story.dropped("p000004-1", "deadline", attempt=2)
    assert story.wrong() == [("ended twice", "p000004-1 (attempt 2)")]


def test_no_token_of_a_group_is_trained_that_was_purged_before_its_batch_was():
    secret = "1_2_20261127_3"
    story = ordinary_story()
    for number, issued in enumerate(story.messages(PROMPT_ISSUED)):
        if issued.prompt_id == "p000001":
            story.alter(PROMPT_ISSUED, number, secrets=secret)
    story.alter(BATCH_TRAINED, 2, lags={0: 1})
    missing = [("fewer tokens than sampled", "batch 2")]
    assert story.wrong() == missing * 2

    story.publish(PurgeRequested("p", "1_2", "", "operator", [secret]))
    story.times = {("purge.requested", 0): 5, ("batch.trained", 2): 6}
    assert story.wrong() == []
    story.alter(BATCH_TRAINED, 2, lags={0: 5})
    assert story.wrong() == [("more tokens than sampled", "batch 2")]

    story.alter(BATCH_TRAINED, 2, lags={0: 1})
    story.times = {("purge.requested", 0): 6, ("batch.trained", 2): 5}  # it was trained before
    assert story.wrong() == missing * 2


def test_a_batch_is_passed_over_only_when_asked_and_its_members_are_dropped():
    story = ordinary_story()
    story.trained(3, len(story.logs["BATCHES"]), 1)
    story.alter(BATCH_TRAINED, 3, lags={}, skipped=True)
    assert story.wrong() == [("unasked skip", "batch 3")]

    story.publish(SkipRequested(3))
    findings = story.findings()
    assert findings.violations == []
    assert (findings.trained, findings.packed, findings.dropped["skipped"]) == (5, 0, 1)


@pytest.mark.parametrize("restored", [False, True])
def test_the_batches_since_a_restored_checkpoint_are_skipped_on_a_new_lineage(restored: bool):
    story = ordinary_story()
    if restored:
        story.publish(CheckpointRestored(1, 1, 2, "low"))
    story.trained(2, story.messages(BATCH_TRAINED)[2].batch_sequence, 2, lineage=1)
    story.alter(BATCH_TRAINED, 3, lags={}, skipped=True)
    for version in (1, 2):
        story.published(version, lineage=1, digest="restored")  # a skipped batch changes no weight

    assert story.wrong() == ([] if restored else [("unasked skip", "batch 2")])


def test_a_batch_holds_no_tokens_of_versions_that_came_after_it():
    story = Story()
    story.publish(RunOpened(9, 0, SETTINGS))
    for version in range(3):
        story.published(version)
    for name in ("p000000-0", "p000000-1"):
        story.issued(name)
        story.graded(name, (0, 1, 2))
    story.trained(1, story.packed(1, "p000000-0", "p000000-1"), lags={0: 6})

    untrained = [("untrained version", f"version {version} of lineage 0") for version in (1, 2)]
    assert story.wrong() == [*untrained, ("unpublished version", "batch 1")]


def test_without_a_learner_all_tokens_are_of_the_model_as_it_is():
    story = Story()
    roles = ["prompter", "rollout", "reward", "buffer", "engine"]
    story.publish(RunOpened(9, 0, {**SETTINGS, "only": roles, "warmup": {"steps": 0}}))
    for name in ("p000000-0", "p000000-1"):
        story.issued(name)
        story.graded(name)
    story.packed(1, "p000000-0", "p000000-1")

    assert story.wrong() == []


def opened_with(story, groups):
    buffer = {**SETTINGS["buffer"], "batch_groups": groups}
    story.publish(RunOpened(9, 0, {**SETTINGS, "warmup": {"steps": 0}, "buffer": buffer}))


def test_batches_are_as_large_as_the_run_was_opened_with_when_they_were_packed():
    story = Story()
    for topic, times in ((RUN_OPENED, (1, 5, 9)), (BATCH_PACKED, (2, 6, 7))):
        story.times |= {(topic.name, number): at for number, at in enumerate(times)}
    opened_with(story, 1)
    story.published(0)
    for number in range(4):
        for name in (f"p00000{number}-0", f"p00000{number}-1"):
            story.issued(name)
            story.graded(name, (0, 0, 0))
    story.packed(1, "p000000-0", "p000000-1")
    opened_with(story, 2)
    story.packed(2, *(f"p00000{number}-{member}" for number in (1, 2) for member in (0, 1)))
    assert story.wrong() == []

    story.packed(3, "p000003-0", "p000003-1")
    assert story.wrong() == [("wrong size", "batch 3")]
    opened_with(story, 1)
    assert ("bound changed", "buffer.batch_groups") in story.wrong()


def test_engines_of_evaluations_answer_with_the_version_that_was_asked_for():
    def findings_of(engines, *versions):
        story = ordinary_story()
        story.alter(RUN_OPENED, 0, settings={**SETTINGS, "eval": {"engines": engines, "prompts": 0}})
        story.publish(EvalRequested("e000000", 1, 2, 1.0))
        members = []
        for name in ("e000000-0", "e000000-1"):
            story.issued(name)
            story.graded(name, versions)
            grade = story.messages(TRAJECTORY_GRADED)[-1]
            members.append(BatchMember(name, 0, grade.payload, grade.reward, len(versions), lengths=grade.lengths))
        counted = {version: 2 * versions.count(version) for version in versions}
        story.publish(EvalScored("e000000", 1, counted, 1.0, 2, 0, 1.0, members))
        return story.wrong()

    assert findings_of("held", 1, 1) == findings_of("", 1, 2) == []
    assert findings_of("held", 1, 2) == [("wrong version", "e000000")]


def test_what_is_live_was_published_and_was_asked_for_or_evaluated():
    story = ordinary_story()
    story.publish(EvalScored("e000000", 1, {}, 1.0, 0, 0, 0.0))
    score = len(story.logs["BATCHES"])
    moves = [("command", 1, 1), ("command", 2, 2), ("rollback", 1, None), ("gate", 2, None)]
    for by, version, asked in moves:
        request = story.publish(PromotionRequested(asked)) if by != "gate" else score
        story.publish(WeightsPromoted(0, version, f"0-{version}", by, request))
    assert story.wrong() == []

    first = len(story.messages(WEIGHTS_PROMOTED)) + 2  # behind the claim
    story.publish(WeightsPromoted(0, 1, "other", "rollback", request))
    story.publish(WeightsPromoted(0, 2, "0-2", "command", 1))  # message 1 claims the log
    story.publish(WeightsPromoted(0, 2, "0-2", "gate", score - 1))
    places = [f"message {first + number} of FLEET" for number in range(3)]
    kinds = ["foreign weights", "unasked promotion", "unasked promotion", "unasked promotion"]
    assert story.wrong() == list(zip(kinds, [places[0], *places], strict=True))


def test_a_canary_was_asked_for_and_what_is_promoted_after_it_is_that_canary():
    story = ordinary_story()
    request = story.publish(PromotionRequested(2, 0.5))
    canary = story.publish(WeightsCanaried(0, 2, "0-2", "0:1:0-1", "command", request, 0.5))
    story.publish(WeightsPromoted(0, 2, "0-2", "canary", canary))
    assert story.wrong() == []

    story.publish(WeightsPromoted(0, 1, "0-1", "canary", canary))
    story.publish(WeightsCanaried(0, 1, "0-1", "0:2:0-2", "command", request, 0.5))
    assert [kind for kind, _ in story.wrong()] == ["unasked promotion", "unasked promotion"]


def test_engines_serve_the_untrained_model_only_in_a_run_without_a_learner():
    def wrong(only, key=UNTRAINED):
        story = Story()
        story.publish(RunOpened(9, 0, {**SETTINGS, "only": only}))
        story.publish(EngineReady("engine-1", "http://h:1", key.lineage, key.version, key.digest, 8))
        return [kind for kind, _ in story.wrong()]

    assert wrong(["engine"]) == []
    assert wrong(["engine"], WeightsPublished(0, 1, "other", "files", "")) == ["foreign weights"]
    assert wrong([]) == ["foreign weights"]


def test_late_and_forged_claims_end_nothing():
    story = ordinary_story()
    story.failed("p000000-0")
    story.failed("p000077-0")
    story.graded("p000078-0", (55,))

    assert story.wrong() == []


def test_tokens_that_two_checkpoints_have_may_be_gone_and_no_others():
    story = ordinary_story()
    story.unsay(TRAJECTORY_GENERATED, 1)
    assert story.wrong() == [("lost", "p000000-0")]

    story.publish(CheckpointSaved(0, 2, "0-2", "there", story.messages(BATCH_TRAINED)[2].batch_sequence))
    assert story.wrong() == []
    story.unsay(TRAJECTORY_GENERATED, 2)  # the next one: of batch 2, which only the newest checkpoint has
    assert story.wrong() == [("lost", "p000001-0")]


def test_tokens_of_every_batch_there_is_may_be_gone_once_the_newest_checkpoint_has_them():
    story = ordinary_story()
    story.publish(CheckpointSaved(0, 2, "0-2", "there", story.messages(BATCH_TRAINED)[2].batch_sequence))
    story.unsay(TRAJECTORY_GENERATED, 3)  # of batch 2
    assert story.wrong() == [("lost", "p000001-0")]  # batch 3 was packed before: another checkpoint would have come

    story.times[CHECKPOINT_SAVED.name, 1], story.times[BATCH_PACKED.name, 3] = 50, 60
    assert story.wrong() == []


def test_what_is_trimmed_while_an_audit_reads_is_not_lost():
    story = ordinary_story()
    story.unsay(TRAJECTORY_GENERATED, 5)
    story.publish(StreamTrimming("TRAJECTORIES", 7))

    assert story.wrong(first_result=3) == []
    assert story.wrong(first_result=7) == [("lost", "p000003-1")]  # it was gone before: the logs do not say why


def test_what_had_ended_when_it_was_trimmed_between_what_is_needed_is_not_lost_and_all_else_is():
    story = ordinary_story()
    story.unsay(TRAJECTORY_GENERATED, 5)

    assert story.wrong(ended={"p000003-1": 7}) == []
    assert story.wrong(ended={"p000003-1": 6}) == [("lost", "p000003-1")]
    assert story.wrong(ended={"p000003-0": 7}) == [("lost", "p000003-1")]
