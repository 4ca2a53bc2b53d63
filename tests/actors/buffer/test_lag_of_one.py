"""`buffer.max_lag = 1`: what is dropped for lag had no batch that would have taken it."""

import random

from harness.buffer_feed import feed
from topics.batches import BatchPacked
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


def test_no_group_is_passed_over_while_it_is_fresh():
    """Groups come, and steps end, in any order that admission allows: 4 groups are open at most."""
    dropped = 0
    for seed in range(200):
        dropped += play(random.Random(seed))
    assert dropped > 50


def play(draw: random.Random) -> int:
    """Play a run; returns how many groups were dropped for lag."""
    fed, trained, packed, number, dropped = feed(steps=30), 0, 0, 0, 0
    open_groups: list[tuple[str, int]] = []  # with the version that samples each, the oldest that still answers
    ready: dict[str, int] = {}
    batches: dict[int, list[str]] = {}
    while trained < 20:
        room = 4 - len(open_groups) - len(ready) - sum(map(len, batches.values()))
        for _ in range(room):
            open_groups.append((f"p{number:06d}", max(0, trained - draw.randrange(2))))
            number += 1
        if batches and draw.random() < 0.4:
            trained += 1
            del batches[trained]
            fed.trained(trained)
        elif open_groups:
            name, version = open_groups.pop(draw.randrange(len(open_groups)))
            ready[name] = version
            fed.group(name, versions=[(version, 3)])
        while decisions := fed.read_back(fed.fold.decide(0)):
            for decision in decisions:
                if isinstance(decision, GroupDropped):
                    assert packed - ready.pop(decision.prompt_id) > 1  # beyond the bound for the next batch
                    dropped += 1
                elif isinstance(decision, BatchPacked):
                    names = [group.prompt_id for group in decision.groups]
                    assert names == [*ready][:2]  # the first that were complete: none is passed over
                    assert all(decision.step - 1 - ready.pop(name) <= 1 for name in names)
                    packed, batches[decision.step] = decision.step, names
        assert len(ready) < 2 or packed - trained > 1  # what is complete waits for company, or for a step alone
    return dropped
