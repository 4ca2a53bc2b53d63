import json
from itertools import product

import numpy as np
import pytest
import torch

from asyncrl.algorithms.balance import Work, balanced
from asyncrl.training.init_model import ModelShape, create_model
from asyncrl.training.ranks import GpuFull, named_where_full, shares, work_of
from topics.batches import BatchGroup, BatchMember, BatchPacked
from topics.trajectories import Reference


def loads(costs, owners, ranks):
    return [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]


def test_the_example_of_largest_differencing():
    # 8 and 7 differ by 1, 6 and 5 by 1; 4 and 1 leave 3, 3 and 1 leave 2: 16 against 14 (Karmarkar and Karp).
    costs = [8, 7, 6, 5, 4]
    owners = balanced(costs, 2)
    assert sorted(loads(costs, owners, 2)) == [14, 16]
    assert balanced(costs, 2) == owners
    assert balanced([5, 5], 1) == [0, 0]
    assert sorted(balanced([1.0], 3)) in ([0], [1], [2])
    assert balanced([], 4) == []


@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_are_near_the_best_partition(ranks):
    rng = np.random.default_rng(0)
    for _ in range(20):
        costs = rng.lognormal(0, 1, 7).tolist()
        best = min(max(loads(costs, owners, ranks)) for owners in product(range(ranks), repeat=7))
        owners = balanced(costs, ranks)
        assert len(owners) == 7 and set(owners) <= set(range(ranks))
        assert max(loads(costs, owners, ranks)) <= best * 7 / 6  # its bound for two ranks


def test_many_rows_of_mixed_length_are_even_to_a_tenth_of_a_percent():
    work = Work(100, 1)
    costs = [work.of(tokens) for tokens in np.random.default_rng(1).lognormal(6, 1, 512).clip(max=4000)]
    found = loads(costs, balanced(costs, 8), 8)
    assert max(found) / min(found) < 1.001


def test_work_is_counted_from_the_shapes(tmp_path):
    shape = ModelShape(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=64, context=32)
    create_model(tmp_path / "tiny", alphabet="ab", seed=0, shape=shape)
    layer = 32 * (2 * 16 + 2 * 16) + 2 * 32 * 16 + 3 * 32 * 64  # queries and outputs, keys and values, three of the FFN
    work = work_of(tmp_path / "tiny")
    assert work == (2 * layer + 32 * 5, 2 * 2 * 16)
    assert work.of(10) == 6 * work.parameters * 10 + 6 * 64 * 100

    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    for name in ("rms_norm_eps", "intermediate_size"):  # other architectures have other names for them
        del config[name]
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    assert work_of(tmp_path / "tiny") == work


def test_a_card_that_is_full_is_named():
    words = "the GPU of rank 3 has no room for the model: tried to allocate"
    with pytest.raises(GpuFull, match=words), named_where_full(3):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")


def test_a_batch_names_the_rank_of_each_trajectory():
    members = [
        BatchMember(f"p000000-{i}", 0, Reference(i + 1, "0" * 16, 13 * size), 1.0, 3)
        for i, size in enumerate([90, 10, 60, 40])
    ]
    packed = BatchPacked(1, "rl", [BatchGroup("p000000", members[:2]), BatchGroup("p000001", members[2:])], 0)
    assert shares(packed, Work(1, 0), 2) in ([0, 0, 1, 1], [1, 1, 0, 0])
    estimated = shares(packed, Work(0, 1), 2)
    for member, lengths in zip(members, ([10], [90], [10, 10, 10], [45, 45]), strict=True):
        member.lengths = lengths  # they count, whatever the bytes
    assert shares(packed, Work(0, 1), 2) in ([0, 1, 0, 0], [1, 0, 1, 1])  # 8,100 against 100 + 300 + 4,050
    assert sorted(loads([10, 90, 30, 90], shares(packed, Work(1, 0), 2), 2)) == [100, 120]
    for member in members:
        member.lengths = []
    assert shares(packed, Work(0, 1), 2) == estimated
    owners = shares(packed, Work(0, 1), 2)  # attention alone: 8,100 against 100 + 3,600 + 1,600
    assert owners[1] == owners[2] == owners[3] != owners[0]


def test_a_group_whose_prompt_is_shared_goes_to_one_rank():
    def group(number, prompt, answers):
        members = [
            BatchMember(
                f"p{number:06d}-{place}", 0, Reference(1, "0" * 16, 999), 1.0, answer, lengths=[prompt + answer]
            )
            for place, answer in enumerate(answers)
        ]
        return BatchGroup(f"p{number:06d}", members)

    packed = BatchPacked(1, "rl", [group(0, 900, [100] * 4), group(1, 10, [350] * 4), group(2, 10, [80])], 0)

    owners = shares(packed, Work(1, 0), 2, whole_groups=True)  # 900 + 400, 10 + 1,400, 90

    assert owners in ([0] * 4 + [1] * 4 + [0], [1] * 4 + [0] * 4 + [1])
    assert Work(1, 1).of_rows([10, 12], 8) == 6 * (2 + 4 + 8) + 6 * (100 + 144 - 64)
