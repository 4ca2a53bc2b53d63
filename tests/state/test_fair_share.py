"""Processes divided by weight, on a clock made by hand."""

from fractions import Fraction

import pytest

from asyncrl.state.fair_share import Apportionment, Held, granted

STEP_S = 0.5
START_S = 1.5  # of a process


def weights(**given: str) -> dict[str, Fraction]:
    return {run: Fraction(weight) for run, weight in given.items()}


class Fleet:
    """Runs whose processes leave at once and take some time to start; what was decided, and when it changed."""

    def __init__(self, given: dict[str, Fraction], count: int, *, start_s: float = START_S) -> None:
        self.apportionment = Apportionment(given, count, window_s=60.0)
        self.start_s, self.now_s = start_s, 100.0
        self.wanted = dict.fromkeys(given, 0)
        self.starting: dict[str, float] = {}
        self.broken: set[str] = set()
        self.idle: set[str] = set()
        self.gone: set[str] = set()
        self.moves: list[float] = []
        self.looks: list[dict[str, int]] = []  # ready by run

    def ready(self, run: str) -> int:
        return 0 if run in self.broken else self.wanted[run] - (self.starting.get(run, 0.0) > self.now_s)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.now_s += STEP_S
            there = [run for run in self.wanted if run not in self.gone]
            held = {run: Held(self.ready(run), self.wanted[run], run not in self.idle) for run in there}
            self.looks.append({run: one.ready for run, one in held.items()})
            for run, count in self.apportionment.decide(self.now_s, held).items():
                if count > self.wanted[run]:
                    self.starting[run] = self.now_s + self.start_s
                    self.moves.append(self.now_s)
                self.wanted[run] = count

    def share(self, run: str, looks: list[dict[str, int]]) -> float:
        return sum(look.get(run, 0) for look in looks) / sum(sum(look.values()) for look in looks)


def test_counts_that_divide_are_dealt_once_and_never_move():
    fleet = Fleet(weights(a="0.7", b="0.3"), 10)
    fleet.run(300)
    assert fleet.wanted == {"a": 7, "b": 3}
    assert len(fleet.moves) == 2


def test_one_of_two_moves_when_the_bound_is_passed():
    fleet = Fleet(weights(a="0.7", b="0.3"), 2, start_s=0.0)
    fleet.run(STEP_S)
    assert fleet.wanted == {"a": 1, "b": 1}  # 1.4 and 0.6: the larger remainder is b's
    # a is owed 0.4 process-seconds a second and b as much less: a difference of 0.04 * 2 * 60 = 4.8 after 6 s.
    fleet.run(5.0)
    assert fleet.wanted == {"a": 1, "b": 1}
    fleet.run(1.5)
    assert fleet.wanted == {"a": 2, "b": 0}
    # Now b is owed 0.6 a second: the difference is 4.8 the other way round 8 s later.
    fleet.run(6.5)
    assert fleet.wanted == {"a": 2, "b": 0}
    fleet.run(2.0)
    assert fleet.wanted == {"a": 1, "b": 1}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("start_s", [0.0, START_S])
def test_shares_hold_over_every_minute(count: int, start_s: float):
    fleet = Fleet(weights(a="0.7", b="0.3"), count, start_s=start_s)
    fleet.run(600)
    width = round(60 / STEP_S)
    settled = fleet.looks[width:]
    shares = [fleet.share("a", settled[at : at + width]) for at in range(len(settled) - width)]
    assert max(abs(share - 0.7) for share in shares) <= 0.05, (min(shares), max(shares))
    between = [after - before for before, after in zip(fleet.moves[2:], fleet.moves[3:], strict=False)]
    assert all(seconds >= 2 * start_s for seconds in between)
    assert len(fleet.moves) <= 2 + 10 * 60 / 3, "no more moves than the tolerance needs"


def test_three_runs_share_what_is_left_over():
    fleet = Fleet(weights(a="5", b="3", c="2"), 4)
    fleet.run(900)
    assert {run: round(fleet.share(run, fleet.looks[-1200:]), 1) for run in "abc"} == {"a": 0.5, "b": 0.3, "c": 0.2}
    assert all(sum(look.values()) >= 3 for look in fleet.looks[10:]), "one moves at a time"


def test_what_a_run_does_not_use_goes_to_the_others_and_comes_back():
    fleet = Fleet(weights(a="0.7", b="0.3"), 10)
    fleet.run(5)
    fleet.idle.add("a")
    fleet.run(STEP_S)
    assert fleet.wanted == {"a": 0, "b": 10}
    fleet.idle.clear()
    fleet.run(STEP_S)
    assert fleet.wanted == {"a": 7, "b": 3}
    fleet.gone.add("b")
    fleet.wanted["b"] = 0
    fleet.run(STEP_S)
    assert fleet.wanted == {"a": 10, "b": 0}
    fleet.idle.add("a")
    fleet.run(30)
    assert fleet.wanted == {"a": 10, "b": 0}, "nothing has work: all stays"


def test_another_process_that_shares_moves_nothing_at_its_start():
    fleet = Fleet(weights(a="0.7", b="0.3"), 2)
    fleet.wanted.update(a=2, b=0)
    fleet.run(STEP_S)
    assert fleet.wanted == {"a": 2, "b": 0}


def test_a_process_stays_for_as_long_as_its_start_took():
    fleet = Fleet(weights(a="0.7", b="0.3"), 2, start_s=20.0)
    fleet.run(600)
    between = [after - before for before, after in zip(fleet.moves[2:], fleet.moves[3:], strict=False)]
    assert between
    assert min(between) >= 40.0
    assert fleet.share("a", fleet.looks) == pytest.approx(0.7, abs=0.05)


def test_a_run_whose_processes_never_start_keeps_nothing_from_the_others():
    fleet = Fleet(weights(a="0.7", b="0.3"), 1)
    fleet.broken.add("b")
    fleet.run(3600)
    assert fleet.share("b", fleet.looks) == 0.0
    last = [look["a"] for look in fleet.looks[-3600:]]
    assert sum(last) / len(last) == pytest.approx(0.7, abs=0.1), "it is a's for as long as it is due to a"


def test_a_run_gets_more_only_where_another_has_left():
    # b is asked for fewer at once; a's third process waits until b's second one has left.
    assert granted({"a": 3, "b": 1}, {"a": 2, "b": 2}, {"a": 2, "b": 2}, 4) == {"a": 2, "b": 1}
    assert granted({"a": 3, "b": 1}, {"a": 2, "b": 1}, {"a": 2, "b": 2}, 4) == {"a": 2, "b": 1}
    assert granted({"a": 3, "b": 1}, {"a": 2, "b": 1}, {"a": 2, "b": 1}, 4) == {"a": 3, "b": 1}


def test_room_is_given_once_and_taken_from_nobody():
    none = {"a": 0, "b": 0, "c": 1}
    assert granted({"a": 1, "b": 1, "c": 0}, none, none, 2) == {"a": 1, "b": 0, "c": 0}
    assert granted({"a": 3}, {"a": 2}, {"a": 2, "b": 3}, 4) == {"a": 2}, "what is there beyond the fleet takes no more"
