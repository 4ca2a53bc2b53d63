"""The share of a batch that turns of one tenant may have."""

from harness.buffer_feed import feed
from topics.batches import BatchPacked
from topics.groups import GroupDropped
from topics.prompts import LIVE_TASK, PromptIssued, PromptRow


def turn(fed, number: int, tenant: str, *, graded: bool = True):
    """A turn of a tenant, issued and graded."""
    name, row = f"l{number:06d}", PromptRow("", metadata={"tenant": tenant})
    fed.publish(PromptIssued(name, 0, 1, [row], task=LIVE_TASK))
    fed.known.add(name)
    return fed.graded(f"{name}-0", size=1) if graded else fed


def batch(fed) -> list[str]:
    [packed] = fed.fold.decide(0)
    assert isinstance(packed, BatchPacked)
    fed.read_back([packed])
    return [group.prompt_id for group in packed.groups]


def test_what_is_beyond_the_share_of_a_tenant_waits_for_the_next_batch():
    fed = feed(batch_groups={"warmup": 2, "rl": 4}, tenant_most=2)
    for number, tenant in enumerate(["anna", "anna", "anna", "ben", "ben"]):
        turn(fed, number, tenant)
    assert batch(fed) == ["l000000", "l000001", "l000003", "l000004"]
    for number, tenant in enumerate(["ben", "ben", "cleo"], 5):
        turn(fed, number, tenant)
    assert batch(fed) == ["l000002", "l000005", "l000006", "l000007"]


def test_turns_beyond_the_share_end_only_where_nothing_else_may_come():
    fed = feed(batch_groups={"warmup": 2, "rl": 4}, tenant_most=2)
    for number in range(4):
        turn(fed, number, "anna")
    turn(fed, 4, "ben", graded=False)
    assert fed.fold.decide(0) == []  # ben's may come, and another after it

    fed.graded("l000004-0", size=1)
    ends = fed.fold.decide(0)
    assert [(end.prompt_id, end.reason) for end in ends if isinstance(end, GroupDropped)] == [("l000003", "tenant")]
    fed.read_back(ends)
    fed.group("p000000")
    assert batch(fed) == ["l000000", "l000001", "l000004", "p000000"]


def test_rows_of_tasks_have_no_tenant():
    fed = feed(tenant_most=1)
    fed.group("p000000").group("p000001")
    assert batch(fed) == ["p000000", "p000001"]
