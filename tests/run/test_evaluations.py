"""An evaluation goes the way of all trajectories, whoever is killed meanwhile, and ends in one score."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from harness.audited import messages_on
from harness.results import is_done
from harness.stage import Stage, until
from harness.user_code import HOLD
from topics.engines import EngineReady
from topics.evals import EVAL_SCORED, EvalRequested, EvalScored
from topics.prompts import PROMPT_ISSUED
from topics.topic import BATCHES, GRADES, PROMPTS, TRAJECTORIES
from topics.trajectories import TRAJECTORY_DROPPED, TRAJECTORY_GENERATED, TRAJECTORY_GRADED

PROMPTS_EACH = 8
FUNCTIONS = (
    HOLD
    + """
async def rollout(row, context):
    tokens = context.tokenizer.encode_prompt(row, max_tokens=None).tolist()
    tokens += (await context.generate(tokens)).tokens.tolist()
    if "folder" in row.metadata:
        await context.tool("hold", hold, row.metadata["folder"], row.metadata["number"])
        context.completion = f"{row.metadata['number']}"
    await context.generate(tokens)

async def reward(completion, metadata):
    if "folder" not in metadata:
        return 1.0
    number = int(completion)
    if number == 3:
        raise ValueError("no reward for the fourth")
    while number == 0 and not Path(metadata["folder"], "grade").exists():
        await asyncio.sleep(0.01)
    return {"reward": number % 2, "number": number}
"""
)


@pytest.fixture
def play(stage: Callable[..., Stage], tmp_path: Path) -> Stage:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    held_out = [{"prompt": "^a=", "metadata": {"folder": str(tmp_path), "number": n}} for n in range(PROMPTS_EACH)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    made = stage(
        engine={"kind": "scripted"},
        task={"rollout": f"{tmp_path / 'functions.py'}:rollout"},
        reward={"function": f"{tmp_path / 'functions.py'}:reward"},
        rollout={"slots": 2 * PROMPTS_EACH, "group_size": 2},
        workers={"lease_s": 1.0},
        buffer={"batch_groups": 2},
        eval={"prompts": PROMPTS_EACH, "source": str(tmp_path / "held_out.jsonl")},
    )
    made.make_model()
    return made


async def of_evaluation(bus: Bus, stream, topic) -> set[str]:
    """Trajectories of the evaluation with a message of a topic."""
    return {name for one in (await messages_on(bus, stream)).on(topic) if (name := one.trajectory_id).startswith("e")}


async def scores(bus: Bus) -> list[EvalScored]:
    return (await messages_on(bus, BATCHES)).on(EVAL_SCORED)


async def ask(bus: Bus) -> None:
    message = EvalRequested("e000000", 0, PROMPTS_EACH, 0.0)
    await publish(bus, message, headers={"writer": "test"})


async def test_an_evaluation_is_scored_once_though_each_role_is_killed_in_its_middle(
    bus: Bus, play: Stage, tmp_path: Path
):
    names = {f"e000000-{member}" for member in range(PROMPTS_EACH)}
    await publish(bus, EngineReady("engine-1", "scripted:1", 0, 0, "made", 16))
    actors = {role: await play.start(role) for role in ("prompter", "rollout", "reward", "buffer")}

    async def kill(role: str) -> None:
        actors[role].kill()
        await actors[role].wait()
        actors[role] = await play.start(role)

    async def reached(stream, topic, wanted: set[str], what: str) -> None:
        await until(lambda: holds(stream, topic, wanted), what)

    async def graded(count: int) -> bool:
        return len(await of_evaluation(bus, GRADES, TRAJECTORY_GRADED)) >= count

    async def holds(stream, topic, wanted: set[str]) -> bool:
        return await of_evaluation(bus, stream, topic) >= wanted

    await ask(bus)
    await until(lambda: holds(PROMPTS, PROMPT_ISSUED, {"e000000-0"}), "it is begun")
    await kill("prompter")
    await until(lambda: len(list(tmp_path.glob("called-*"))) == PROMPTS_EACH, "all are held at once, beside the slots")
    await until(lambda: trained_ones(bus), "training goes on meanwhile")
    await kill("rollout")
    (tmp_path / "answer").touch()
    await reached(TRAJECTORIES, TRAJECTORY_GENERATED, names, "all are answered")
    await until(lambda: graded(PROMPTS_EACH - 2), "all are graded but one that waits and one that fails")
    await kill("buffer")
    await kill("reward")
    assert await scores(bus) == []
    (tmp_path / "grade").touch()
    await until(lambda: scored(bus), "it is scored")
    await ask(bus)
    await kill("buffer")
    await until(lambda: is_done(bus, "reward"), "all rewards are given")

    [score] = await scores(bus)
    assert (score.eval_id, score.prompts, score.failed) == ("e000000", PROMPTS_EACH, 1)
    assert score.accuracy == pytest.approx(3 / 8)  # those with the numbers 1, 5 and 7
    [dropped] = (await messages_on(bus, BATCHES)).on(TRAJECTORY_DROPPED)
    assert {member.trajectory_id for member in score.members} == names - {dropped.trajectory_id}
    assert sorted(member.reward for member in score.members) == [0.0] * 4 + [1.0] * 3
    assert score.metrics["reward/number"] == pytest.approx((0 + 1 + 2 + 4 + 5 + 6 + 7) / 7)
    assert dropped.reason == "reward"
    assert "no reward for the fourth" in dropped.detail
    issued = [one for one in (await messages_on(bus, PROMPTS)).on(PROMPT_ISSUED) if one.stage == "eval"]
    assert sorted(one.trajectory_id for one in issued) == sorted(names)
    assert {(one.temperature, one.task, len(one.rows)) for one in issued} == {(0.0, "task", 1)}


async def test_without_an_engine_of_its_own_it_ends_with_a_reason_while_training_goes_on(
    bus: Bus, stage: Callable[..., Stage]
):
    made = stage(
        engine={"groups": {"train": {"kind": "scripted"}, "held": {"kind": "scripted"}}},
        rollout={"slots": 8, "group_size": 2},
        buffer={"batch_groups": 2},
        eval={"prompts": PROMPTS_EACH, "engines": "held", "deadline_s": 2.0},
    )
    made.make_model()
    await publish(bus, EngineReady("engine-train-1", "scripted:1", 0, 0, "made", 16))
    await ask(bus)
    for role in ("prompter", "rollout", "reward", "buffer"):
        await made.start(role)
    await until(lambda: trained_ones(bus), "training goes on")
    await until(lambda: scored(bus), "the evaluation ends")

    [score] = await scores(bus)
    assert (score.failed, score.versions) == (PROMPTS_EACH, {})
    assert score.reason == "8 of 8 answers have no grade: they were open at eval.deadline_s"
    assert await of_evaluation(bus, TRAJECTORIES, TRAJECTORY_GENERATED) == set()


async def scored(bus: Bus) -> bool:
    return bool(await scores(bus))


async def trained_ones(bus: Bus) -> bool:
    """Return whether trajectories of training were graded."""
    grades = (await messages_on(bus, GRADES)).on(TRAJECTORY_GRADED)
    return sum(one.stage == "rl" for one in grades) >= 4
