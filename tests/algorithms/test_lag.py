from collections import Counter

import numpy as np

from asyncrl.algorithms.lag import fresh_mask, fresh_share, lag_histogram, split_lags, token_lags
from topics.trajectories import Segment, count_versions

VERSIONS = np.array([-1, -1, 2, 3, 3, 5, 9], np.int32)
MASK = np.array([0, 1, 1, 1, 1, 1, 1], np.uint8)


def test_lag_is_counted_from_the_version_the_batch_is_applied_to():
    # Batch 6 is applied to version 5. Version 9 is of an older line; -1 is supervised.
    assert token_lags(VERSIONS, step=6).tolist() == [0, 0, 3, 2, 2, 0, 0]


def test_a_batch_sampled_by_the_weights_it_updates_has_no_lag():
    assert token_lags(np.array([0], np.int32), step=1).tolist() == [0]


def test_lag_in_the_queue_is_that_of_the_newest_token_and_the_rest_was_in_flight():
    rows = [[-1, 2, 3, 5], [-1, -1], [4]]  # batch 8 is applied to version 7
    versions, lengths = np.array([one for row in rows for one in row], np.int32), np.array([len(row) for row in rows])
    in_queue, in_flight = split_lags(versions, lengths, steps=np.array([8, 8, 6]))

    assert in_queue.tolist() == [0, 2, 2, 2, 0, 0, 1]
    assert in_flight.tolist() == [0, 3, 2, 0, 0, 0, 0]
    whole = split_lags(VERSIONS, np.array([3, 4]), steps=np.array([6, 6]))
    assert sum(whole).tolist() == token_lags(VERSIONS, step=6).tolist()


def test_older_tokens_lose_their_mask_and_supervised_ones_keep_it():
    mask = fresh_mask(VERSIONS, MASK, min_version=3)
    assert mask.tolist() == [0, 1, 0, 1, 1, 1, 1]
    assert mask.dtype == np.uint8
    assert MASK.tolist() == [0, 1, 1, 1, 1, 1, 1]


def test_a_mask_never_grows():
    rng = np.random.default_rng(0)
    for _ in range(50):
        versions, mask = rng.integers(-1, 6, 20).astype(np.int32), rng.integers(0, 2, 20).astype(np.uint8)
        assert (fresh_mask(versions, mask, min_version=int(rng.integers(-2, 6))) <= mask).all()


def test_fresh_share_counts_trainable_tokens_only():
    counts = count_versions([Segment(np.arange(7, dtype=np.int32), MASK, np.zeros(7, np.float32), VERSIONS)])

    assert fresh_share(counts, min_version=3) == 5 / 6
    assert fresh_share(counts, min_version=100) == 1 / 6
    assert fresh_share([], min_version=3) == 1.0


def test_tokens_are_counted_by_version_in_all_segments_and_only_those_that_are_trained():
    rng = np.random.default_rng(1)
    drawn = [rng.integers(-1, 3, size).astype(np.int32) for size in (0, 1, 2, 40, 7)]
    segments = [
        Segment(np.zeros_like(one), rng.integers(0, 2, len(one)).astype(np.uint8), np.zeros(len(one), np.float32), one)
        for versions in drawn
        for one in (versions, np.sort(versions))
    ]
    trained = [version for one in segments for version in one.versions[one.mask != 0].tolist()]

    counts = count_versions(segments)

    assert [(one.version, one.tokens) for one in counts] == sorted(Counter(trained).items())
    assert count_versions([]) == []


def test_the_histogram_counts_trained_tokens_that_a_policy_sampled():
    assert lag_histogram(VERSIONS, MASK, step=6) == {0: 2, 2: 2, 3: 1}
    assert lag_histogram(VERSIONS, np.zeros(7, np.uint8), step=6) == {}
