"""M2PO over a whole batch: against a loop that removes one token after another, at any split of the rows."""

import numpy as np
import pytest

from asyncrl.algorithms.masks import second_moments
from harness.training import policy_rows


def rows_with(seed, count=12):
    """Rows whose trainer is some way from the sampler; the prompt and each fourth token count for nothing."""
    rng, rows = np.random.default_rng(seed), policy_rows(np.random.default_rng(seed), count)
    for row in rows:
        row.weights[3::4] = 0.0
        row.columns["proximal"] = (row.logprobs + 0.5 * rng.normal(size=len(row.tokens))).astype(np.float32)
    return rows


def counted(row):
    return [at for at in range(len(row.tokens)) if row.mask[at] and row.weights[at] > 0]


def by_loop(rows, cap):
    """The largest are removed one by one until the mean of the rest is small enough."""
    left = {
        (number, at): (float(row.columns["proximal"][at]) - float(row.logprobs[at])) ** 2
        for number, row in enumerate(rows)
        for at in counted(row)
    }
    everything = set(left)
    while left and sum(left.values()) / len(left) > cap:
        del left[max(left, key=left.get)]
    return everything - left.keys()


def named(columns):
    return {(number, int(at)) for number, column in enumerate(columns) for at in np.flatnonzero(column)}


def alone(own):
    return own


@pytest.mark.parametrize("cap", [0.0, 0.01, 0.04, 0.1, 1.0])
def test_the_largest_go_until_the_mean_of_the_batch_is_within_the_cap(cap):
    for seed in range(4):
        rows = rows_with(seed)
        assert named(second_moments(rows, alone, cap=cap)) == by_loop(rows, cap)


def test_every_rank_names_what_all_rows_together_say():
    rows = rows_with(3)
    whole = second_moments(rows, alone, cap=0.04)
    parts, given = (rows[7:], rows[:2], [], rows[2:7]), []
    for part in parts:
        second_moments(part, lambda own: (given.append(own), own)[1], cap=0.04)
    values = np.concatenate(given)
    found = [second_moments(part, lambda _: values, cap=0.04) for part in parts]

    expected = [whole[7:], whole[:2], [], whole[2:7]]
    for columns, others in zip(found, expected, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(columns, others, strict=True))
    assert 0 < sum(column.sum() for column in whole) < len(values)


def test_equal_values_go_together():
    rows = rows_with(0, 2)
    for row in rows:
        row.logprobs[:] = -2.0
        row.columns["proximal"][:] = -1.5  # squares of 0.25, exactly
    everything = {(number, at) for number, row in enumerate(rows) for at in counted(row)}
    assert named(second_moments(rows, alone, cap=0.25)) == set()
    assert named(second_moments(rows, alone, cap=0.2)) == everything
    first = (0, counted(rows[0])[0])
    rows[0].columns["proximal"][first[1]] = -2.0  # the mean of all stays above the cap
    assert named(second_moments(rows, alone, cap=0.1)) == everything - {first}
    assert second_moments([], alone, cap=0.2) == []
