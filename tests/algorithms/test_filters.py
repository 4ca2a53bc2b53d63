"""Filters by groups worked by hand, each on both sides of its bounds."""

import msgspec
import pytest

from asyncrl.algorithms.filters import FILTERS, filter_of, filtered_by
from asyncrl.algorithms.named import AlgorithmError
from asyncrl.config.learner_settings import FilterOptions
from topics.batches import BatchMember
from topics.trajectories import Reference


def group(rewards=(), tokens=(), truncated=(), **metrics):
    """A group whose lists are as long as the longest of them, padded with 1.0, 10 tokens and nothing else."""
    size = max(map(len, (rewards, tokens, truncated, *metrics.values())))
    return [
        BatchMember(
            f"p0-{at}",
            0,
            Reference(1, "", 1),
            rewards[at] if rewards else 1.0,
            tokens[at] if tokens else 10,
            truncated[at] if truncated else False,
            {name: values[at] for name, values in metrics.items()},
        )
        for at in range(size)
    ]


def test_a_right_answer_that_is_punished_for_its_length_passes():
    right = [msgspec.structs.replace(member, reward=0.484, unshaped=1.0) for member in group([0.0] * 3)]

    assert filter_of("pass_rate", {})(right)  # all pass
    assert not filter_of("pass_rate", {})([*right, *group([0.0])])


@pytest.mark.parametrize(
    ("name", "options", "members", "dropped"),
    [
        ("pass_rate", {}, group([0.0, 1.0]), False),
        ("pass_rate", {}, group([0.0, 0.0]), True),  # DAPO eq. 11: 0 < right < G
        ("pass_rate", {}, group([1.0, 1.0]), True),
        ("pass_rate", {}, group([0.5, 0.9]), True),  # different rewards, and none passes
        ("pass_rate", {"passing": 0.9}, group([0.5, 0.9]), False),
        ("pass_rate", {"above": 0.25}, group([1.0, 0.0, 0.0, 0.0]), True),  # at the bound
        ("pass_rate", {"above": 0.24}, group([1.0, 0.0, 0.0, 0.0]), False),
        ("pass_rate", {"below": 0.75}, group([1.0, 1.0, 1.0, 0.0]), True),
        ("pass_rate", {"below": 0.76}, group([1.0, 1.0, 1.0, 0.0]), False),
        ("pass_rate", {"above": -1.0, "below": 2.0}, group([1.0, 1.0]), False),
        ("zero_variance", {}, group([0.3, 0.1 + 0.2]), True),  # equal but for rounding
        ("zero_variance", {}, group([0.0, 0.0]), True),
        ("zero_variance", {}, group([1e-7, 2e-7]), False),
        ("zero_variance", {}, group([0.3]), False),
        ("length", {"most_tokens": 15}, group(tokens=[10, 20]), False),
        ("length", {"most_tokens": 14}, group(tokens=[10, 20]), True),
        ("length", {"least_tokens": 15}, group(tokens=[10, 20]), False),
        ("length", {"least_tokens": 16}, group(tokens=[10, 20]), True),
        ("length", {}, group(truncated=[True, False]), False),
        ("length", {}, group(truncated=[True, True, False]), True),
        ("repetition", {}, group(repetition=[0.5, 0.5]), False),
        ("repetition", {}, group(repetition=[0.51, 0.5]), False),  # half of the members is not more than half
        ("repetition", {}, group(repetition=[0.51, 0.51, 0.0]), True),
        ("repetition", {"most_members": 0.0}, group(repetition=[0.51, 0.0]), True),
        ("repetition", {}, group([1.0, 0.0]), False),  # not measured
        ("garbage", {}, group(garbage=[0.05, 0.05]), False),
        ("garbage", {"most": 0.04}, group(garbage=[0.05, 0.05]), True),
    ],
)
def test_a_filter_drops_what_is_out_of_its_bounds(name, options, members, dropped):
    assert filter_of(name, {name: options})(members) is dropped


def test_the_first_filter_that_drops_a_group_is_its_reason():
    members = group([1.0, 1.0], tokens=[1, 1])

    assert filtered_by(members, ["length", "zero_variance"], {}) == "length"
    assert filtered_by(members, ["zero_variance", "length"], {}) == "zero_variance"
    assert filtered_by(members, ["zero_variance", "length"], {"length": {"least_tokens": 1}}) == "zero_variance"
    assert filtered_by(members, ["length"], {"length": {"least_tokens": 1}}) == ""


def test_options_that_a_filter_does_not_have_are_refused():
    with pytest.raises(AlgorithmError, match=r"options .* of filter \"length\": Object contains unknown field `most`"):
        filter_of("length", {"length": {"most": 3}})


def test_every_filter_with_options_has_its_settings():
    with_options = {name: rule for name, rule in FILTERS.items() if rule.__struct_fields__}

    assert {field.name: field.type for field in msgspec.structs.fields(FilterOptions)} == with_options
    assert FilterOptions().of(["zero_variance", "garbage"]) == {"garbage": {"most": 0.05, "most_members": 0.5}}
