"""A whole run on rewards of turns whose rollout worker is killed: batches have them, and a replay is bit-equal."""

import json
from pathlib import Path

import pytest

from harness.audited import messages_on
from harness.gated import closed_gate
from harness.recorded import Recorded
from harness.runs import command, topics_left_in, up
from topics.batches import BATCH_PACKED
from topics.topic import BATCHES, TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED, TRAJECTORY_GRADED

pytestmark = pytest.mark.slow

TURNS = """
import numpy as np
from gated import pass_gate

async def rollout(row, context):
    prompt = context.tokenizer.encode_prompt(row, max_tokens=None)
    first = await context.generate(prompt, max_new_tokens=3)
    second = await context.generate(np.concatenate([prompt, first.tokens, prompt]), max_new_tokens=3)
    third = await context.generate(prompt, max_new_tokens=2)
    await pass_gate(context)
    hits = [sum(letter in row.label for letter in turn.text) / 4 for turn in (first, second, third)]
    context.outcome(turn_rewards=hits)
"""


async def test_rewards_of_turns_reach_the_batches_and_a_replay_is_bit_equal(tmp_path: Path):
    (tmp_path / "turns.py").write_text(TURNS)
    own = [f"task.rollout={tmp_path / 'turns.py'}:rollout", 'reward.function=""', "nats.keep=run", "learner.steps=3"]
    own += [
        "learner.advantage=turns",
        "learner.turn_discount=0.5",
        "warmup.steps=1",
        "workers.lease_s=1.0",
        "buffer.max_lag=2",  # the killed trajectory is one version older than others
    ]
    own += ["learner.offload_idle=true"]  # which changes no bit: the replay never rests
    gate = closed_gate(tmp_path, 1)
    async with up(tmp_path, *own) as run:
        await run.reaches(lambda: 1 in run.steps(), "its first step")
        await run.kill("rollout-1")
        gate.unlink()
        assert await run.ended() == 0, run.story
        name = run.root.name
        moved = [row["bytes"] for row in run.events("learner-1") if row["event"] == "trainer offloaded"]
    assert max(moved) > 0, "the moments of the optimiser, at least"

    async with topics_left_in(run.root) as bus:
        said = (await messages_on(bus, BATCHES)).on(BATCH_PACKED)
        recorded = await Recorded.read(bus, Path((run.root / "base").read_text()))
        results = {one.trajectory_id: one for one in (await messages_on(bus, TRAJECTORIES)).on(TRAJECTORY_GENERATED)}
    members = [member for packed in said if packed.stage == "rl" for group in packed.groups for member in group.members]
    assert len(members) == 3 * 8 * 4
    for member in members:
        result = results[member.trajectory_id]
        assert member.turn_rewards == result.outcome.turn_rewards
        assert member.reward == pytest.approx(sum(member.turn_rewards))
        assert [[turn for turn, _ in segment.turns] for segment in result.segments] == [[0, 1], [2]]
    assert {packed.objective.turn_discount for packed in said if packed.stage == "rl"} == {0.5}
    code, output = await command(tmp_path, "audit", name, "--deep")
    assert (code, ": clean\n" in output) == (0, True), output
    code, output = await command(tmp_path, "samples", name, "--step", "3", "--count", "1", "--json")
    [shown] = [json.loads(output)]
    assert shown["turn_rewards"] == results[shown["name"]].outcome.turn_rewards
    turns = ", ".join(f"{value:g}" for value in shown["turn_rewards"])
    code, output = await command(tmp_path, "explain", name, shown["name"])
    assert output.count(f"reward {sum(shown['turn_rewards']):g} (turns {turns})") == 3, "graded, packed and below"
    check_planted(recorded)
    code, output = await command(tmp_path, "replay", name)
    assert (code, "published versions bit-equal" in output) == (0, True), output


def check_planted(recorded: Recorded) -> None:
    """Other rewards of turns, in a batch alone, and in its grade as well, are found."""
    packed = recorded.messages(BATCH_PACKED)[recorded.batch(3)]
    member = packed.groups[0].members[0]
    member.turn_rewards = [*reversed(member.turn_rewards[1:]), member.turn_rewards[0] + 0.25]

    recorded.alter(BATCH_PACKED, recorded.batch(3), groups=packed.groups)
    assert recorded.kinds() == {"not graded"}
    names = [grade.trajectory_id for grade in recorded.messages(TRAJECTORY_GRADED)]
    recorded.alter(TRAJECTORY_GRADED, names.index(member.trajectory_id), turn_rewards=member.turn_rewards)
    assert recorded.kinds() == {"wrong rewards"}
