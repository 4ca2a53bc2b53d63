"""Which version an engine holds that serves evaluations alone."""

import random

import pytest

from actors.engine.pinned_version import HeldVersions
from harness.folds import Feed
from topics.evals import EvalRequested, EvalScored
from topics.weights import WeightsPublished


class Log:
    """Messages in their order."""

    def __init__(self) -> None:
        self.held = HeldVersions()
        self.fed = Feed(self.held)

    def publish(self, version: int, *, lineage: int = 0, base: str = "", answers: int = 0) -> int:
        digest = f"d{version}l{lineage}"
        message = WeightsPublished(lineage, version, digest, "files", "/w", base=base, answers=answers)
        return self.fed.publish(message).sequence

    def request(self, number: int, version: int) -> None:
        self.fed.publish(EvalRequested(f"e{number:06d}", version, 4, 0.0))

    def score(self, number: int, version: int) -> None:
        self.fed.publish(EvalScored(f"e{number:06d}", version, {}, 0.0, 4, 0, 1.0))

    @property
    def wanted(self) -> str:
        found = self.held.wanted()
        return found.version.key if found is not None else ""


@pytest.fixture
def log() -> Log:
    return Log()


def test_the_oldest_open_evaluation_is_held_until_it_is_scored(log: Log):
    assert log.wanted == ""
    log.publish(0)
    assert log.wanted == ""  # nobody asked for it
    log.request(0, 0)
    for version in (1, 2, 3):
        log.publish(version)
    log.request(1, 3)
    assert log.wanted == "0:0:d0l0"
    log.score(0, 0)
    assert log.wanted == "0:3:d3l0"
    log.score(1, 3)
    assert log.wanted == ""


def test_requests_and_scores_of_ended_evaluations_cancel_in_either_order(log: Log):
    log.publish(5)
    log.score(0, 5)
    log.request(0, 5)
    log.request(1, 5)
    log.score(1, 5)
    assert log.wanted == ""


def test_a_rollback_does_not_exchange_the_weights_of_an_open_evaluation(log: Log):
    log.publish(5)
    log.request(0, 5)
    log.publish(4, lineage=1)
    log.publish(5, lineage=1)
    assert log.wanted == "0:5:d5l0"
    log.score(0, 5)
    log.publish(5, lineage=2)
    log.request(1, 5)
    assert log.wanted == "2:5:d5l2"


def test_a_version_whose_bytes_were_refused_is_passed_over_until_it_is_written_once_more(log: Log):
    log.publish(1)
    log.request(0, 1)
    log.publish(2)
    log.request(1, 2)
    refused = log.held.wanted()
    assert refused is not None
    log.held.pass_over(refused)
    assert log.wanted == "0:2:d2l0"
    log.publish(1, answers=refused.sequence)
    assert log.wanted == "0:1:d1l0"


def test_what_is_asked_for_stays_known_with_what_it_is_a_difference_to(log: Log):
    log.publish(0)
    log.publish(1, base="0:0:d0l0")
    log.publish(2, base="0:1:d1l0")
    log.request(0, 2)
    for version in range(3, 500):
        log.publish(version)
    found = log.held.wanted()
    assert found is not None
    assert [one.version for one in log.held.chain(found)] == [0, 1, 2]
    assert len(log.held._known) == 3 + 64
    log.score(0, 2)
    log.publish(500)
    assert len(log.held._known) == 64


@pytest.mark.parametrize("seed", range(20))
def test_the_same_version_is_held_however_the_two_logs_are_read(seed: int):
    chance = random.Random(seed)
    training, batches = [], []
    for version in range(30):
        training.append(WeightsPublished(0, version, f"d{version}", "files", "/w"))
        if version % 3 == 0:
            training.append(EvalRequested(f"e{version // 3:06d}", version, 4, 0.0))
    for number in chance.sample(range(10), chance.randrange(10)):
        batches.append(EvalScored(f"e{number:06d}", 3 * number, {}, 0.0, 4, 0, 1.0))
    open_ones = {3 * number for number in range(10)} - {scored.version for scored in batches}
    held, at = HeldVersions(), 0
    fed = Feed(held)
    rest = list(batches)
    while at < len(training) or rest:
        if rest and (at == len(training) or chance.random() < 0.3):
            fed.publish(rest.pop(0))
        else:
            fed.publish(training[at])
            at += 1
    found = held.wanted()
    assert (found.version.version if found is not None else None) == min(open_ones, default=None)
