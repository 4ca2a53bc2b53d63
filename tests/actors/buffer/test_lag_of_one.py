"""`buffer.max_lag = 1`: what is dropped for lag had no batch that would have taken it."""

from harness.buffer_feed import feed
from topics.groups import GroupDropped


def test_what_the_version_before_a_step_sampled_behind_it_fits_no_batch():
    """Batches 1 and 2 are full when step 1 is trained; an engine that has not loaded version 1 yet answers two more."""
    fed = feed()
    for number in range(4):
        fed.group(f"p{number:06d}", versions=[(0, 3)])
    packed = [fed.read_back(fed.fold.decide(0)) for _ in range(2)]
    assert [(batch.step, len(batch.groups)) for (batch,) in packed] == [(1, 2), (2, 2)]
    fed.trained(1)

    fed.group("p000004", versions=[(0, 3)]).group("p000005", versions=[(0, 1), (1, 2)])
    drops = fed.read_back(fed.fold.decide(0)), fed.fold.decide(0)

    # Batch 3 is applied to version 2: tokens of version 0 would have lag 2. What was continued by version 1 waits.
    assert drops == ([GroupDropped("p000004", "lag", members=2, tokens=6)], [])
    fed.group("p000006", versions=[(1, 3)])
    (batch,) = fed.fold.decide(0)
    assert (batch.step, batch.min_version) == (3, 1)
    assert [group.prompt_id for group in batch.groups] == ["p000005", "p000006"]
