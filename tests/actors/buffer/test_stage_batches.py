"""The stage of a batch is the newest one of its prompts, and its filters hold for all of its groups."""

from harness.buffer_feed import feed
from topics.batches import BatchPacked, Objective
from topics.groups import GroupDropped
from topics.stages import StageBegan


def objective(_step, stage):
    return Objective(stage=stage or None, filters=["zero_variance"] if stage == "strict" else [])


def began(fed, name, prompt):
    return fed.publish(StageBegan(name=name, prompt=prompt, request=1))


def batch(fed):
    [packed] = fed.read_back(fed.fold.decide(0))
    assert isinstance(packed, BatchPacked)
    return packed.objective.stage, [group.prompt_id for group in packed.groups]


def test_a_batch_follows_the_newest_stage_of_its_prompts_and_later_ones_never_an_older():
    fed = feed(objective=objective, ahead=5, max_lag=9)
    for number in range(3):
        fed.issued(f"p{number:06d}-0")
    fed.group("p000001").group("p000003")
    began(fed, "wide", 4)
    fed.group("p000005").group("p000000").group("p000002").group("p000004")

    assert batch(fed) == (None, ["p000001", "p000003"])
    assert batch(fed) == ("wide", ["p000005", "p000000"])
    fed.issued("p000006-0")
    began(fed, "first", 7)
    assert batch(fed) == ("wide", ["p000002", "p000004"])
    fed.group("r000000").group("p000006")
    assert batch(fed)[0] == "first", "a prompt that is issued again is of the stage at its issue"


def test_a_group_of_an_earlier_stage_in_a_batch_of_a_later_one_passes_its_filters():
    fed = feed(objective=objective)
    fed.group("p000000", (1.0, 1.0))
    began(fed, "strict", 1)
    fed.group("p000001")

    dropped = fed.read_back(fed.fold.decide(0))

    assert dropped == [GroupDropped("p000000", "zero_variance", members=2, tokens=6, rewards=[1.0, 1.0])]
    fed.group("p000002", (1.0, 1.0)).group("p000003")
    assert [end.prompt_id for end in fed.read_back(fed.fold.decide(0))] == ["p000002"]
    assert batch(fed) == ("strict", ["p000001", "p000003"])


def test_a_fork_begins_in_its_stage():
    fed = feed(objective=objective, stages=[(0, "wide"), (3, "first")])

    assert batch(fed.group("p000003").group("p000004"))[0] == "first"
