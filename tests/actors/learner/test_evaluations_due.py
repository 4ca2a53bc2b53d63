"""Evaluations fall due by the step, and each is asked for once, whoever asks."""

import msgspec

from actors.learner.fold import Evaluations, LearnerFold
from asyncrl.config.settings import Config
from harness.folds import Feed

SETS = {"easy": {"prompts": 4}, "hard": {"prompts": 2, "samples": 8, "temperature": 1.0}}


class Learner:
    """The fold of a learner, and what it asks for."""

    def __init__(self, **settings: object) -> None:
        self.config = msgspec.convert({"learner": {"steps": 10}, "eval": settings}, Config)
        self.fed = Feed(LearnerFold(self.config))
        self.restart()

    def restart(self) -> None:
        self.evaluations = Evaluations(self.config, self.fed.fold)

    def at(self, step: int, *, stored: int | None = None) -> list[tuple[str, str]]:
        """Ask at a step; `stored` of the requests are stored and read back."""
        found = self.evaluations.due(step)
        for request in found[:stored]:
            self.fed.publish(request)
        return [(request.eval_id, request.dataset) for request in found]


def test_the_first_and_the_last_version_and_every_so_many_are_evaluated():
    learner = Learner(prompts=4, every=4)
    asked = {step: learner.at(step) for step in range(-1, 11)}
    assert {step: names for step, names in asked.items() if names} == {
        0: [("e000000", "")],
        4: [("e000001", "")],
        8: [("e000002", "")],
        10: [("e000003", "")],
    }
    assert learner.at(10) == []


def test_each_set_is_asked_for_once_though_the_learner_dies_between_two_requests():
    learner = Learner(sets=SETS)
    assert learner.at(0, stored=1) == [("e000000", "easy"), ("e000001", "hard")]

    learner.restart()

    assert learner.at(0) == [("e000001", "hard")]
    assert learner.at(0) == []


def test_a_request_says_how_its_set_is_sampled():
    [_, hard] = Learner(sets=SETS).evaluations.due(0)
    assert (hard.prompts, hard.samples, hard.temperature) == (2, 8, 1.0)


def test_without_prompts_nothing_is_evaluated():
    assert Learner().at(0) == []
