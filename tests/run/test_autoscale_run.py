"""A whole run whose rollout workers grow by their load, are scaled by hand, and whose supervisor is killed."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.state.status import run_status
from asyncrl.state.watch import read_state
from harness.runs import WITHOUT_MODEL, Run, address_of, command, kill, two_steps_more, up
from topics.runs import ScalingStatus

pytestmark = pytest.mark.slow

BUSY = (
    *WITHOUT_MODEL,
    "learner.steps=100000",
    "rollout.slots=4",
    "buffer.batch_groups=4",
    "engine.scripted_mean_s=0.5",  # three workers take longer for a batch than all others for its step
    "autoscale.pools.rollout={ min = 1, max = 3 }",
    "autoscale.window_s=1.0",
    "autoscale.cool_s=1.0",
)


async def scaling(run: Run) -> ScalingStatus:
    """Return the row of the rollout workers in `asyncrl status`."""
    bus = await Bus.connect(address_of(run), "short")
    try:
        state = await read_state(bus)
    finally:
        await bus.close()
    [found] = [one for one in run_status(state, state.last_ns).scalings if one.pool == "rollout"]
    return found


def decisions(run: Run) -> list[dict[str, Any]]:
    """Return the decisions of all supervisors, in order."""
    return [line for line in run.events("supervisor-1") if line["event"] == "fleet scaled" and "rollout" in line]


async def test_workers_grow_with_their_queue_until_a_user_scales_by_hand(tmp_path: Path):
    async with up(tmp_path, *BUSY) as run:
        await run.reaches(lambda: run.actor("rollout-3"), "a third worker, as prompts wait")
        grown = await scaling(run)
        assert (grown.after, grown.by) == (3, "autoscale"), grown
        assert "wait for" in grown.reason

        code, output = await command(tmp_path, "scale", "rollout=1")
        assert code == 0, output
        by_hand = await scaling(run)
        assert (by_hand.before, by_hand.after, by_hand.by) == (3, 1, "command")
        assert by_hand.held.startswith("left as asyncrl scale asked, for ")

        count, supervisor = len(decisions(run)), run.actor("supervisor-1")
        kill(supervisor)
        await run.reaches(lambda: run.actor("supervisor-1") not in (None, supervisor), "another supervisor")
        await two_steps_more(run, "it trains on")
        assert (await scaling(run)).after == 1
        assert len(decisions(run)) == count, "what was asked before is not decided again"
        assert [found["by"] for found in decisions(run)][-1] == "command"
        run.interrupt()
        assert await run.ended() == 0, run.story
