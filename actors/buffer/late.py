"""Late members: a batch took the first of their group, they continue, and a later batch takes them. Pure."""

from __future__ import annotations

from actors.buffer.groups import drop
from actors.buffer.lag import lagging, too_old
from actors.buffer.state import LAG, BufferState, Group, Plan
from topics.batches import BatchGroup
from topics.ids import member_of
from topics.wire import Message


def note_taken(state: BufferState, group: Group, packed: BatchGroup) -> bool:
    """Note the members that a batch took; returns whether others of the group continue."""
    group.taken |= {member_of(member.trajectory_id): member for member in packed.members}
    group.further, group.keep = set(packed.further), True
    state.ready[group.stage].pop(group.prompt_id, None)
    state.continued[group.prompt_id] = None
    return bool(group.further)


def note_dropped(group: Group, member: int) -> bool:
    """Note the end of a member; returns whether it was the last one that continued."""
    continued = member in group.further
    group.further.discard(member)
    return continued and not group.further


def ends(state: BufferState, plan: Plan) -> list[Message]:
    """Ends of late members that failed, and of all of them after the last batch."""
    is_over = state.packed >= plan.steps
    found: list[Message] = []
    for prompt_id in state.continued:
        group = state.groups[prompt_id]
        for member in sorted(group.further):
            if (failed := group.failed.get(member)) is not None:
                found.append(drop(group, member, failed.reason, detail=failed.detail))
            elif is_over:
                found.append(drop(group, member, "surplus"))
    return found


def too_late(state: BufferState, plan: Plan, step: int) -> list[Message]:
    """Ends of graded late members that are too old for a batch."""
    graded = [(state.groups[name], member) for name in state.continued for member in state.groups[name].to_train()]
    least = step - 1 - plan.max_lag
    old = [(group, member) for group, member in graded if too_old(plan, member, least)]
    return [drop(group, member.member, LAG, lag=lagging(member, step)) for group, member in old]


def graded(state: BufferState) -> list[Group]:
    """Groups with late members that the next batch takes."""
    return [group for name in state.continued if (group := state.groups[name]).to_train()]
