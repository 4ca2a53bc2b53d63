"""Groups whose data keys were erased: nothing of them can be read any more, so they end."""

from __future__ import annotations

from actors.buffer.ends import drop_group
from actors.buffer.state import BufferState, Group
from topics.wire import Message


def erase(state: BufferState, secrets: list[str]) -> None:
    """Note that data keys were erased."""
    state.purged.update(secrets)
    for group in state.groups.values():
        purge_if_gone(state, group)


def purge_if_gone(state: BufferState, group: Group) -> None:
    """Note that a group is to end, where a data key of it was erased."""
    if not state.purged.isdisjoint(group.secrets.split(",")):
        state.purging[group.prompt_id] = None


def ended(state: BufferState) -> list[Message]:
    """The ends of these groups."""
    return [drop_group(state.groups[prompt_id], "purged") for prompt_id in state.purging]
