"""Tournaments by the properties that they promise, over groups of 2 to 17 whose true order is known."""

import asyncio
import random

import numpy as np
import pytest

from asyncrl.algorithms.tournaments import TOURNAMENTS, Matches, places, single_elimination, swiss
from asyncrl.errors import FunctionError
from asyncrl.rewards.tournaments import TournamentReward
from harness.child_graders import grading, outcomes

SIZES = range(2, 18)


class Noiseless:
    """A judge that sees the true worth of both, and counts the pairs that it was asked for."""

    def __init__(self, worth, bias=0.0):
        self.worth, self.bias, self.asked = worth, bias, []

    async def __call__(self, left, right):
        self.asked.append((left, right))
        return self.worth[left] + self.bias, self.worth[right]


class Ordinal(Noiseless):
    """A judge that says who is better and not by how much."""

    async def __call__(self, left, right):
        one, other = await super().__call__(left, right)
        return 0.5 * (one >= other) + 0.5 * (one > other), 0.5 * (other >= one) + 0.5 * (other > one)


def worth_of(size, seed):
    return random.Random(seed).sample(range(size), size)


@pytest.mark.parametrize("name", TOURNAMENTS)
async def test_the_true_best_has_the_greatest_score_and_scores_follow_the_truth(name):
    found, truth = [], []
    for size in SIZES:
        for seed in range(20):
            worth = worth_of(size, seed)
            judge = Noiseless(worth)
            scores = await TOURNAMENTS[name](size, judge, random.Random(seed))
            best = worth.index(size - 1)
            assert scores[best] == max(scores), (size, seed)
            assert scores.count(scores[best]) == 1, (size, seed)
            assert all(0.0 <= score <= 1.0 for score in scores)
            assert sum(scores) == pytest.approx(size / 2)
            found += scores
            truth += [value / (size - 1) for value in worth]
    assert np.corrcoef(found, truth)[0, 1] > (0.75 if name == "swiss" else 0.9)


@pytest.mark.parametrize("name", TOURNAMENTS)
@pytest.mark.parametrize("size", SIZES)
async def test_a_judge_that_favours_the_first_place_changes_nothing(name, size):
    worth = worth_of(size, 3)
    fair = await TOURNAMENTS[name](size, Noiseless(worth), random.Random(5))

    assert await TOURNAMENTS[name](size, Noiseless(worth, bias=100.0), random.Random(5)) == fair


@pytest.mark.parametrize("name", TOURNAMENTS)
@pytest.mark.parametrize("size", [1, *SIZES])
async def test_members_that_are_all_equal_have_equal_scores(name, size):
    scores = await TOURNAMENTS[name](size, Noiseless([1.0] * size), random.Random(0))

    assert scores == [0.5] * size


@pytest.mark.parametrize("name", TOURNAMENTS)
@pytest.mark.parametrize("judging", [Noiseless, Ordinal])
async def test_of_a_mixed_group_all_that_tie_for_the_best_are_first_and_none_that_met_and_tied_are_apart(name, judging):
    for size in SIZES:
        for seed in range(20):
            draw = random.Random(100 * seed + size)
            worth = [draw.randrange(max(2, size // 2)) for _ in range(size)]
            judge = judging(worth)
            scores = await TOURNAMENTS[name](size, judge, random.Random(seed))
            first = {member for member in range(size) if scores[member] == max(scores)}
            best = {member for member in range(size) if worth[member] == max(worth)}
            if name == "anchor" and judging is Ordinal:  # whoever is better than the anchor is first
                assert best <= first, (size, seed)
            else:
                assert best == first, (size, seed)
            met = {pair for pair in judge.asked if worth[pair[0]] == worth[pair[1]]}
            assert all(scores[left] == scores[right] for left, right in met), (size, seed)


async def test_a_tie_does_not_put_those_together_of_whom_one_beat_the_other():
    async def judge(left, right):  # 0 and 1 tie, 1 and 2 tie, and 0 beats 2
        return (1.0, 0.0) if (left, right) == (0, 2) else (0.0, 1.0) if (left, right) == (2, 0) else (0.5, 0.5)

    matches = Matches(judge)
    await matches.play_all([(0, 1), (1, 2), (0, 2)])

    assert matches.tied([0, 0, 0]) == [{0, 1}, {0, 1}, {2}]
    assert matches.tied([1, 2, 3]) == [{0}, {1, 2}, {1, 2}]
    assert matches.beaten == {2}


@pytest.mark.parametrize("name", ["single_elimination", "double_elimination", "swiss"])
@pytest.mark.parametrize("winner", [1, 2])
async def test_a_member_that_never_lost_is_above_one_that_it_beat_whatever_their_numbers(name, winner):
    met = set()

    async def judge(left, right):  # 0 ties with both
        met.add((left, right))
        return (0.5, 0.5) if 0 in (left, right) else (float(left == winner), float(right == winner))

    for seed in range(20):
        met.clear()
        scores = await TOURNAMENTS[name](3, judge, random.Random(seed))
        assert (1, 2) not in met or scores[winner] > scores[3 - winner], seed


@pytest.mark.parametrize("size", SIZES)
async def test_the_number_of_matches_is_that_of_the_topology_and_no_pair_meets_twice(size):
    matches = {}
    for name, tournament in TOURNAMENTS.items():
        judge = Noiseless(worth_of(size, 1))
        await tournament(size, judge, random.Random(2))
        pairs = [frozenset(pair) for pair in judge.asked]
        assert sorted(judge.asked) == sorted(set(judge.asked)), name
        assert len(pairs) == 2 * len(set(pairs)), name  # each pair once in either order
        matches[name] = len(set(pairs))

    assert matches["anchor"] == size - 1
    assert matches["round_robin"] == size * (size - 1) // 2
    assert matches["swiss"] <= (size // 2) * int(np.ceil(np.log2(size)))
    assert matches["single_elimination"] <= 2 * size - 2
    assert matches["double_elimination"] <= 2 * size - 1


async def test_the_order_of_a_swiss_tournament_is_found_whoever_sits_where():
    """Wins are credited to their members, however these are shuffled for a round."""
    for seed in range(300):
        worth = worth_of(8, seed)
        scores = await swiss(8, Noiseless(worth), random.Random(seed))
        assert scores[worth.index(7)] == 1.0


async def test_a_knock_out_by_hand():
    # Seeds against member 0 (worth 2): 3, 1, 0, 2, so that 3 meets 2 and 1 meets 0 before the final.
    scores = await single_elimination(4, Noiseless([2, 5, 1, 9]), random.Random(0))

    assert scores == pytest.approx([1 / 3, 2 / 3, 0.0, 1.0])


def test_places_are_shared():
    assert places([3, 1, 2]) == [1.0, 0.0, 0.5]
    assert places([5, 5, 1]) == [0.75, 0.75, 0.0]
    assert places([4, 4, 4]) == [0.5, 0.5, 0.5]
    assert places([7]) == [0.5]


# A judge of a user's file


@pytest.mark.parametrize("name", TOURNAMENTS)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_users_judge_ranks_the_true_best_first_in_a_child_process(tmp_path, name, kind):
    source = f"""
    from asyncrl import TournamentReward
    {kind} judge(first, second, prompt, label):
        return float(int(first) > int(second))
    reward = TournamentReward("{name}", judge)
    """
    worth = worth_of(8, 4)
    async with grading(tmp_path, source, batch=len(worth)) as grader:
        scores = await outcomes(grader, [str(value) for value in worth])

    async def compare(left, right):
        return float(worth[left] > worth[right]), float(worth[left] < worth[right])

    assert scores[worth.index(7)] == max(scores)
    assert scores == await TOURNAMENTS[name](8, compare, random.Random(""))  # the harness names no trajectory


def ask(reward, completions, prompts=None):
    size = len(completions)
    return reward(completions, prompts or ["p"] * size, [None] * size, [f"p000000-{member}" for member in range(size)])


async def test_matches_of_a_round_are_judged_side_by_side():
    together = asyncio.Barrier(56)  # 28 pairs of 8, in both orders

    async def judge(first, second, prompt, label):
        await together.wait()
        return len(first), len(second)

    async with asyncio.timeout(120):
        scores = await ask(TournamentReward("round_robin", judge), ["x" * length for length in range(8)])

    assert scores == pytest.approx([place / 7 for place in range(8)])


@pytest.mark.parametrize(
    ("verdict", "found"),
    [(2.0, "from 0 to 1"), ((1.0,), "returned 1 scores"), ("left", "'left'; expected a number"), (float("nan"), "nan")],
)
async def test_a_verdict_that_is_none_fails_the_group(verdict, found):
    with pytest.raises(ValueError, match=found):
        await ask(TournamentReward("anchor", lambda *_: verdict), ["a", "b"])


async def test_a_tournament_compares_several_answers_to_one_prompt():
    reward = TournamentReward("anchor", lambda *_: 1.0)
    with pytest.raises(ValueError, match="one completion"):
        await ask(reward, ["a"])
    with pytest.raises(ValueError, match="several prompts"):
        await ask(reward, ["a", "b"], ["p", "q"])


def test_a_tournament_that_is_none_and_a_judge_that_is_called_otherwise_are_refused():
    with pytest.raises(FunctionError, match="no tournament 'league'; there are anchor, round_robin"):
        TournamentReward("league", lambda *_: 1.0)
    with pytest.raises(FunctionError, match="the judge is called with first, second, prompt and label"):
        TournamentReward("swiss", lambda first: 1.0)
    with pytest.raises(FunctionError, match="it is a tournament itself"):
        TournamentReward("swiss", TournamentReward("anchor", lambda *_: 1.0))
