"""Figures that a batch records of its trajectories, by numbers worked by hand, and their display."""

from actors.buffer.groups import batch_figures, references
from actors.recorder.fold import RecorderFold
from asyncrl.state.records import FLAT_STEPS
from asyncrl.state.summary import summary_text
from harness.buffer_feed import feed
from harness.folds import Feed, failure
from topics.actors import RunOpened
from topics.batches import BATCH_PACKED, BatchGroup, BatchPacked, BatchTrained, Objective
from topics.groups import GROUP_DROPPED
from topics.table import BUILT_IN
from topics.trajectories import (
    Reference,
    TrajectoryGraded,
    VersionCount,
)


def graded(name, reward, tokens, **fields):
    prompt_id, member = name.rsplit("-", 1)
    return TrajectoryGraded(
        trajectory_id=name,
        prompt_id=prompt_id,
        member=int(member),
        group_size=2,
        stage="rl",
        payload=Reference(1, "00", 1),
        versions=[VersionCount(0, count) for count in tokens],
        reward=reward,
        **fields,
    )


def test_a_batch_records_what_filters_read_of_its_members():
    given = {"truncated": True, "metrics": {"garbage": 0.5, "format": 1.0}, "lengths": [9, 8]}
    (found,) = references([graded("p0-0", 1.0, [4, 6], **given)])

    assert (found.reward, found.tokens, found.truncated, found.metrics) == (1.0, 10, True, {"garbage": 0.5})
    assert found.lengths == [9, 8]


def test_figures_of_two_groups():
    groups = [
        [graded("p0-0", 1.0, [4, 6], metrics={"format": 1.0}), graded("p0-1", 1.0, [2], discarded=7)],
        [  # two engines that draft: 6 tokens in 4 passes
            graded("p1-0", 0.0, [4], truncated=True, metrics={"format": 0.0, "depth": 3.0}, verified=4, passes=2),
            graded("p1-1", 1.0, [4], hybrid=True, verified=2, passes=2),
        ],
    ]

    assert batch_figures(groups, [1.0, 2.0, 3.0, 6.0]) == {
        "response_tokens_mean": 5.0,
        "response_tokens_max": 10.0,
        "discarded_tokens": 7.0,
        "truncated_share": 0.25,
        "accept_length": 1.5,
        "hybrid_share": 0.25,
        "issue_to_grade_s_mean": 3.0,
        "issue_to_grade_s_max": 6.0,
        "flat_groups_share": 0.5,
        "reward/depth": 3.0,
        "reward/format": 0.5,
    }


def test_of_too_many_metrics_those_that_most_trajectories_have_are_kept():
    groups = [
        [graded("p0-0", 1.0, [4], metrics={"common": 1.0, **{f"a{number}": 1.0 for number in range(50)}})],
        [graded("p1-0", 0.0, [4], metrics={"common": 3.0, **{f"b{number}": 1.0 for number in range(50)}})],
    ]

    figures = batch_figures(groups, [1.0])

    assert len([name for name in figures if name.startswith("reward/")]) == 64
    assert figures["reward/common"] == 2.0


def test_a_group_of_one_has_no_spread_to_speak_of():
    assert "flat_groups_share" not in batch_figures([[graded("p0-0", 1.0, [4])]], [1.0])


def test_seconds_from_issue_to_grade_are_those_of_the_servers_clock_and_leave_out_the_time_a_run_rested():
    buffer = feed(batch_groups={"warmup": 2, "rl": 2})
    for name, issued_s, graded_s in (("p0-0", 10, 14), ("p0-1", 10, 20), ("p1-0", 20, 22)):
        buffer.issued(name, at_s=issued_s).publish(graded(name, 1.0, [4]), at_s=graded_s)
    buffer.publish(RunOpened(10, 0, {}), at_s=1000)
    buffer.publish(graded("p1-1", 1.0, [4]), at_s=1004)

    (packed,) = buffer.fold.decide(1004)

    figures = packed.figures
    assert (figures["issue_to_grade_s_mean"], figures["issue_to_grade_s_max"]) == ((4 + 10 + 2 + 4) / 4, 10)


def test_rows_of_the_metrics_file_hold_the_figures_and_the_pace():
    feed = Feed(RecorderFold())
    for step, at_s in ((1, 10.0), (2, 14.0)):
        group = BatchGroup("p0", references([graded("p0-0", 1.0, [60]), graded("p0-1", 1.0, [40])]))
        packed = BatchPacked(step, "rl", [group], 0, Objective(), {"response_tokens_mean": 5.0 + step})
        feed.publish(packed, at_s=at_s - 1)
        trained = BatchTrained(step, 0, "rl", {"wait_s": 0.5, "train_s": 2.0}, {0: 100}, 0, [0.5, 0.1], 8, step)
        feed.publish(trained, at_s=at_s)

    first, second = feed.fold.rows

    assert (first["response_length/mean"], second["response_length/mean"]) == (6.0, 7.0)
    assert (first["wait_s"], "throughput/tokens_per_s" in first) == (0.5, False)
    assert (second["throughput/tokens_per_s"], second["waste/share"]) == (25.0, 0.0)
    feed.publish(RunOpened(2, 0, {}), at_s=100)
    summary = feed.fold.summary("run", [])
    assert summary["last_batch"] == {"response_tokens_mean": 7.0}
    assert (summary["learner_wait_s"], summary["learner_train_s"]) == (1.0, 4.0)
    assert summary["rl_trained_tokens_per_s"] == 200 / (14 - 9)


def test_steps_whose_rewards_are_all_equal_are_remarked_upon():
    feed = Feed(RecorderFold())
    for step, spread in enumerate([0.2, *[0.0] * FLAT_STEPS], 1):
        feed.publish(BatchTrained(step, 0, "rl", {}, {0: 10}, 0, [0.0, spread], 2, step))
    summary = feed.fold.summary("run", []) | {"metrics": ""}

    assert summary["steps_without_spread"] == FLAT_STEPS
    assert "in the last 5 steps all rewards of a batch were equal" in summary_text(summary)
    feed.publish(BatchTrained(7, 0, "rl", {"grad_norm": 0.1}, {0: 10}, 0, [1.0, 0.0], 2, 7))  # turns have no baseline
    assert "nothing learned" not in summary_text(feed.fold.summary("run", []) | {"metrics": ""})


def test_every_token_that_was_sampled_and_not_trained_on_is_wasted_once():
    buffer, recorder = feed(batch_groups={"warmup": 2, "rl": 1}), Feed(RecorderFold())
    for name, reward in (("p000000-0", 0.0), ("p000000-1", 1.0), ("p000001-0", 0.0)):
        buffer.issued(name).publish(graded(name, reward, [50], discarded=10))
    failed = failure("p000001-1", tokens=30)
    buffer.issued("p000001-1").publish(failed).publish(failed)

    decisions = [*buffer.read_back(buffer.fold.decide(0)), *buffer.read_back(buffer.fold.decide(0))]
    for decision in decisions:
        recorder.publish(decision)
    recorder.publish(BatchTrained(1, 0, "rl", {}, {0: 95}, 5, [0.5, 0.1], 2, 1))
    summary = recorder.fold.summary("run", [])

    assert [BUILT_IN.topic_for(decision) for decision in decisions] == [GROUP_DROPPED, BATCH_PACKED]
    assert decisions[0].tokens == 60 + 30
    assert (summary["sampled_tokens"], summary["trained_tokens"]) == (120 + 90, 95)
    assert summary["wasted_token_share"] == recorder.fold.rows[0]["waste/share"] == round(1 - 95 / 210, 4)


def test_figures_of_each_task_that_a_run_names():
    groups = [
        [graded("p0-0", 1.0, [4], task="words"), graded("p0-1", 0.0, [2], task="words")],
        [graded("p1-0", 0.25, [4], task="sums")],
    ]

    figures = batch_figures(groups, [1.0, 1.0, 1.0])

    assert {name: value for name, value in figures.items() if name.startswith("task/")} == {
        "task/words/reward_mean": 0.5,
        "task/words/trajectories": 2.0,
        "task/sums/reward_mean": 0.25,
        "task/sums/trajectories": 1.0,
    }


def test_a_batch_records_the_metrics_that_its_objective_reads_as_rewards():
    (found,) = references([graded("p0-0", 1.0, [4], metrics={"correct": 1.0, "short": 0.5, "depth": 3.0})], ["short"])

    assert found.metrics == {"short": 0.5}
