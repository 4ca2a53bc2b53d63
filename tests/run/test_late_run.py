"""A whole run that keeps late members, whose worker is killed: each is trained once, within the lag, and replayed."""

from pathlib import Path

import pytest

from harness.audited import assert_within_lag
from harness.recorded import Recorded
from harness.runs import command, topics_left_in, up
from topics.batches import BATCH_PACKED, BatchPacked

pytestmark = pytest.mark.slow

KEPT = ["rollout.oversample=2", "rollout.late=keep", "rollout.slots=8", "buffer.batch_groups=4", "eval.prompts=0"]


def late_groups(recorded: Recorded) -> list[int]:
    """Numbers of the batches with late members."""
    batches: list[BatchPacked] = recorded.messages(BATCH_PACKED)
    return [number for number, packed in enumerate(batches) if len(packed.new_groups) < len(packed.groups)]


async def test_late_members_are_trained_once_and_all_adds_up(tmp_path: Path):
    async with up(tmp_path, *KEPT, "learner.steps=8", "nats.keep=run") as run:
        await run.reaches(lambda: 2 in run.steps(), "its second step")
        await run.kill("rollout-1")
        assert await run.ended() == 0, run.story
    code, output = await command(tmp_path, "audit", "short", "--deep")
    assert (code, ": clean\n" in output) == (0, True), output
    code, output = await command(tmp_path, "replay", "short")
    assert (code, "bit-equal" in output) == (0, True), output
    assert_within_lag(run, max_lag=2)
    async with topics_left_in(run.root) as bus:
        recorded = await Recorded.read(bus, Path((run.root / "base").read_text()))
    groups = [group for packed in recorded.messages(BATCH_PACKED) for group in packed.groups]
    members = [member.trajectory_id for group in groups for member in group.members]
    assert len(members) == len(set(members)) > 8 * 4 * 4
    assert recorded.findings().violations == []

    [first, *_] = late_groups(recorded)
    other = recorded.copy()
    other.alter(BATCH_PACKED, first, lambda packed: packed.groups[-1].before.pop())
    assert "wrong batch" in other.kinds()
    other = recorded.copy()
    other.alter(BATCH_PACKED, first, lambda packed: packed.groups[-1].members.append(packed.groups[-1].before[0]))
    assert "in two batches" in other.kinds()
    other = recorded.copy()
    other.alter(BATCH_PACKED, first, lambda packed: packed.groups.pop())
    assert {"no end", "left over"} & other.kinds()
