"""What `asyncrl doctor` says about idle engines and learners, from states made by hand."""

import pytest

from asyncrl.state.idle import idle_hints
from harness.states import NOW_S, MadeState
from topics.actors import ActorStarted


def state(*, train_s: float, held: int) -> MadeState:
    """A run of a step in a second, with 8 slots."""
    case = MadeState()
    for step in range(6, 14):
        case.trained(step, at_s=NOW_S - 14 + step, train_s=train_s).packed(step)
    return case.vitals("rollout-1", held=held, slots=8)


@pytest.mark.parametrize(
    ("train_s", "held", "words"),
    [
        (0.5, 8, "the learner is idle: the learner trains 50% of the time"),
        (0.5, 8, "add an engine, `asyncrl scale engine=2`"),
        (0.99, 4, "engines are idle: the learner trains 99% of the time, and 50% of the rollout slots are taken"),
        (0.99, 4, "give the learner more GPUs"),
        (0.5, 4, "raise buffer.max_lag from 2 to 3"),
    ],
)
def test_the_idle_part_and_the_change_that_uses_it_are_named(train_s: float, held: int, words: str):
    case = state(train_s=train_s, held=held)
    case.state.steps = case.state.steps[-8:]

    (hint,) = idle_hints(case.state)

    assert words in hint


def test_a_full_pool_that_others_wait_for_is_named_with_its_workers():
    case = state(train_s=0.5, held=0).publish(ActorStarted("rollout", "rollout-slow-1", "elsewhere", 1))
    case.vitals("rollout-slow-1", held=8, slots=8)
    case.state.steps = case.state.steps[-8:]
    case.state.wanted["rollout-slow"] = 1
    case.queue("rollout-slow", waiting=50, under_way=8)

    (hint,) = idle_hints(case.state)

    assert hint.startswith("other workers wait for the pool rollout-slow, whose slots are all taken: the learner ")
    assert hint.endswith("50% of the rollout slots are taken; add a worker, `asyncrl scale rollout.slow=2`")


def test_a_run_that_is_busy_or_has_few_steps_has_no_hint():
    busy = state(train_s=0.99, held=8)
    busy.state.steps = busy.state.steps[-8:]

    assert idle_hints(busy.state) == []
    busy.state.steps = state(train_s=0.1, held=8).state.steps[-3:]
    assert idle_hints(busy.state) == []


def test_tokens_that_were_too_old_are_in_the_line_of_a_step():
    case = MadeState()
    case.state.take_events()
    newest = case.state.steps[-1].message
    newest.lags, newest.masked = {0: 90}, 10
    assert case.state.too_old == 0.1
    case.trained(6, at_s=NOW_S)

    assert case.state.take_events()[-1].text.endswith("10% too old")
