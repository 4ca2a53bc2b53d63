"""The share of a batch that turns of one tenant may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from actors.buffer.ends import drop_group
from actors.buffer.state import Group
from topics.wire import Message

CROWDED = "tenant"
"""Reason of the drop of a turn whose tenant has its share of the batch, where nothing else may come."""


def crowded(ready: Sequence[Group], most: int) -> list[Group]:
    """Return the groups that go beyond their tenants' share of the next batch; the oldest of each tenant come first.

    Args:
        ready: complete groups, in their order.
        most: turns of one tenant in a batch.
    """
    counts = Counter[str]()
    found = []
    for group in ready:
        if group.tenant:
            counts[group.tenant] += 1
            if counts[group.tenant] > most:
                found.append(group)
    return found


def make_room(over: Sequence[Group], missing: int, under_way: Iterable[str]) -> list[Message]:
    """Return ends for turns that hold the credit of others; none while any group is under way that may fill the batch.

    Args:
        over: groups beyond their tenants' share.
        missing: groups that the batch needs besides those that it may have.
        under_way: groups of the stage that are not ready.
    """
    if any(True for _ in under_way):
        return []
    return [drop_group(group, CROWDED) for group in over[-missing:]]
