"""Measures of completions and the over-long punishment, by scalar loops and by numbers worked by hand."""

import random

import numpy as np
import pytest

from asyncrl.rewards.quality import garbage, repetition
from asyncrl.rewards.shaping import overlong_penalty
from topics.trajectories import Segment


def segment(sampled, prompt=0):
    total = prompt + len(sampled)
    tokens = np.array([7] * prompt + list(sampled), np.int32)
    mask = np.array([0] * prompt + [1] * len(sampled), np.uint8)
    return Segment(tokens, mask, np.zeros(total, np.float32), np.full(total, -1, np.int32))


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    # DAPO: L_max = 20480 and L_cache = 4096, so that 16384 tokens are free.
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20479, -4095 / 4096), (20480, -1.0), (20481, -1.0)],
)
def test_the_punishment_is_that_of_dapo_at_its_boundaries(tokens, penalty):
    assert overlong_penalty(tokens, longest=20480, interval=4096) == penalty


def test_an_interval_as_long_as_the_longest_punishes_every_token():
    assert [overlong_penalty(tokens, longest=4, interval=4) for tokens in range(6)] == [0, -0.25, -0.5, -0.75, -1, -1]


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        ([], 0.0),
        ([1, 2, 3], 0.0),
        ([1, 2, 3, 4], 0.0),
        ([5] * 8, 1 - 1 / 5),
        ([1, 2, 3, 4, 1, 2, 3, 4], 1 - 4 / 5),  # 1234 2341 3412 4123 1234
    ],
)
def test_repetition_is_the_share_of_4_grams_that_occurred_before(sampled, expected):
    assert repetition([segment(sampled, prompt=9)]) == pytest.approx(expected)


def test_repetition_agrees_with_a_loop_over_several_segments():
    draw = random.Random(1)
    rows = [[draw.randrange(3) for _ in range(draw.randrange(40))] for _ in range(5)]
    seen, grams = set(), 0
    for row in rows:
        for start in range(len(row) - 3):
            seen.add(tuple(row[start : start + 4]))
            grams += 1

    assert repetition([segment(row) for row in rows]) == pytest.approx(1 - len(seen) / grams)


@pytest.mark.parametrize(
    ("text", "share"),
    [("", 0.0), ("a b\n\tc", 0.0), ("数学 é 🙂", 0.0), ("ab\ufffd\x00", 0.5), ("\ue000a", 0.5), ("\u0378", 1.0)],
)
def test_garbage_is_the_share_of_characters_that_no_writing_has(text, share):
    assert garbage(text) == share
