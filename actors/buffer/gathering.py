"""Groups whose members are graded together: when that begins, and when it has taken too long."""

from __future__ import annotations

from actors.buffer.ends import drop, drop_group
from actors.buffer.plan import Plan
from actors.buffer.state import BufferState, Group
from asyncrl.config.held_out import set_of
from topics.groups import GroupCompleted, group_of
from topics.ids import Stage, stage_of
from topics.wire import Message


def gather(state: BufferState, plan: Plan, group: Group, member: int) -> None:
    """Note that the members graded with this one are to be graded, once none of them is under way any more.

    In an evaluation those are the answers to its row, else the whole group.
    """
    if not group.submitted or group.prompt_id not in state.issued[stage_of(group.prompt_id)]:
        return
    first, behind, group_id = 0, group.size, group.prompt_id
    if group.stage == "eval":
        samples = set_of(plan.held_out, group.task).samples
        first = member - member % samples
        behind, group_id = first + samples, f"{group.prompt_id}-{first}"
    if group_id in group.completed:
        return
    members = range(first, behind)
    waiting = [one for one in members if group.waits_for_group(one)]
    if waiting and all(map(group.is_known, members)):
        state.gathered[group_id] = waiting
    else:
        state.gathered.pop(group_id, None)


def completed(state: BufferState) -> list[Message]:
    """Groups of which no member is under way any more, to be graded."""
    return [
        GroupCompleted(group_id, [_group(state, group_id).submitted[member] for member in members])
        for group_id, members in state.gathered.items()
    ]


def deadline_s(state: BufferState, plan: Plan, stage: Stage, begun_ns: int) -> float:
    """The deadline of what began at a moment of the server's clock; while the run rested, it came no nearer."""
    return max(begun_ns, state.opened_ns) / 1e9 + plan.deadline_s[stage]


def grading_deadlines(state: BufferState, plan: Plan) -> dict[str, float]:
    """Deadlines of groups that are being graded: as long after that began as others are after their issue."""
    return {
        group_id: deadline_s(state, plan, stage_of(group_id), begun_ns)
        for group_id, begun_ns in state.grading.items()
        if _waiting(state, group_id)
    }


def expired_grading(state: BufferState, plan: Plan, now_s: float) -> list[Message]:
    """The ends of members that nobody graded in time."""
    decisions: list[Message] = []
    for group_id, end_s in grading_deadlines(state, plan).items():
        group = _group(state, group_id)
        if end_s > now_s:
            continue
        if len(group.live()) < group.least:
            decisions.append(drop_group(group, "deadline"))
        else:
            decisions += [drop(group, member, "deadline") for member in _waiting(state, group_id)]
    return decisions


def _group(state: BufferState, group_id: str) -> Group:
    return state.groups[group_of(group_id)]


def _waiting(state: BufferState, group_id: str) -> list[int]:
    """The members that one call was asked for and that have no grade yet."""
    group = _group(state, group_id)
    return [member for member in group.completed[group_id] if group.waits_for_group(member)]
