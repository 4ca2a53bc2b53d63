"""Evaluations in an audit: each that is due is requested, answered as requested, and scored."""

import pytest

from harness.stories import Story
from topics.actors import RunOpened
from topics.batches import BatchMember
from topics.evals import EVAL_REQUESTED, EVAL_SCORED, EvalRequested, EvalScored
from topics.prompts import PROMPT_ISSUED
from topics.trajectories import TRAJECTORY_GENERATED, TRAJECTORY_GRADED
from topics.weights import TrainingFinished

STEPS = 3


def evaluate(story: Story, version: int) -> None:
    """Request, answer and score an evaluation of two prompts."""
    name = f"e{len(story.messages(EVAL_REQUESTED)):06d}"
    story.publish(EvalRequested(name, version, 2, 1.0))
    members = []
    for member in (f"{name}-0", f"{name}-1"):
        story.issued(member)
        story.graded(member, (version,))
        grade = story.messages(TRAJECTORY_GRADED)[-1]
        members.append(BatchMember(member, 0, grade.payload, grade.reward, 1, lengths=grade.lengths))
    story.publish(EvalScored(name, version, {version: 2}, 1.0, 2, 0, 1.0, members))


def told(evaluated: range = range(STEPS + 1), *, every: int = 1) -> Story:
    """A run that evaluates these of its versions."""
    story = Story()
    opened = {"buffer": {"max_lag": 1, "batch_groups": 1}, "learner": {"steps": STEPS}}
    story.publish(RunOpened(STEPS, 0, opened | {"eval": {"prompts": 2, "every": every}}))
    for step in range(STEPS + 1):
        if step:
            names = [f"p{step - 1:06d}-{member}" for member in (0, 1)]
            for name in names:
                story.issued(name)
                story.graded(name, (step - 1,) * 3)
            story.trained(step, story.packed(step, *names), lags={0: 6})
        story.published(step)
        if step in evaluated:
            evaluate(story, step)
    story.publish(TrainingFinished(STEPS, "steps"))
    return story


def test_a_run_whose_evaluations_are_requested_and_scored_is_clean():
    assert told().wrong(deep=True) == []
    assert told(range(0, STEPS + 1, STEPS), every=0).wrong() == []


@pytest.mark.parametrize("version", range(STEPS + 1))
def test_an_evaluation_that_was_due_and_never_requested_is_found(version: int):
    story = told()
    for topic, count in ((EVAL_REQUESTED, 1), (EVAL_SCORED, 1), (PROMPT_ISSUED, 2)):
        name = f"e{version:06d}"
        for _ in range(count):
            ids = [getattr(message, "eval_id", "") or message.prompt_id for message in story.messages(topic)]
            story.unsay(topic, ids.index(name))

    assert ("left out", f"version {version}") in story.wrong()


def test_the_score_of_an_evaluation_answers_its_request():
    for fields in ({"version": 1}, {"dataset": "other"}, {"samples": 2, "prompts": 1}):
        story = told()
        story.alter(EVAL_SCORED, 2, **fields)

        assert story.wrong() == [("wrong evaluation", "e000002")]


def test_a_complete_evaluation_without_a_score_is_left_over_once_a_later_one_is_scored():
    story = told()
    grades = [grade.trajectory_id for grade in story.messages(TRAJECTORY_GRADED)]
    story.times |= {("trajectory.graded", number): number for number, name in enumerate(grades) if name.startswith("e")}
    story.times |= {("eval.scored", number): 10**6 for number in range(STEPS + 1)}
    assert story.wrong() == []

    story.unsay(EVAL_SCORED, 1)
    assert story.wrong() == [("left over", "e000001")]

    story = told()
    story.unsay(EVAL_SCORED, STEPS)  # its score may follow
    assert story.wrong() == []


def test_an_evaluation_that_was_passed_over_by_the_next_one_is_left_out():
    story = told()
    for topic in (PROMPT_ISSUED, TRAJECTORY_GENERATED, TRAJECTORY_GRADED):
        for _ in range(2):
            ids = [message.prompt_id for message in story.messages(topic)]
            story.unsay(topic, ids.index("e000001"))
    story.unsay(EVAL_SCORED, 1)

    assert ("left out", "e000001") in story.wrong()
