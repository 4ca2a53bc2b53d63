"""A run with two held-out sets, one of several answers: each is scored by its own rules, and the audit agrees."""

from pathlib import Path

import pytest

from harness.audited import messages_on
from harness.runs import command, topics_left_in, up
from topics.evals import EVAL_SCORED
from topics.prompts import PROMPT_ISSUED
from topics.topic import BATCHES, PROMPTS

pytestmark = pytest.mark.slow

SETTINGS = [
    *("warmup.steps=2", "learner.steps=2", "learner.assertions.first_k3=0.001", "learner.assertions.broken=stop"),
    *("eval.prompts=4", "eval.sets.words.temperature=0.0"),
    *("eval.sets.odd.samples=3", "eval.sets.odd.temperature=1.0", "eval.sets.odd.pass_at=[1, 3]"),
    "eval.sets.odd.max_new_tokens=5",
]
REWARD = "def reward(completion):\n    return float(len(completion) % 2)\n"


async def test_each_set_is_scored_by_its_own_rules(tmp_path: Path):
    (tmp_path / "odd.py").write_text(REWARD)
    async with up(tmp_path, *SETTINGS, f"eval.sets.odd.reward={tmp_path / 'odd.py'}:reward") as run:
        assert await run.ended() == 0, run.story
    code, output = await command(tmp_path, "audit", str(run.root), "--deep")
    assert (code, ": clean\n" in output) == (0, True), output

    async with topics_left_in(run.root) as bus:
        scores = sorted((await messages_on(bus, BATCHES)).on(EVAL_SCORED), key=lambda one: one.eval_id)
        issued = [one for one in (await messages_on(bus, PROMPTS)).on(PROMPT_ISSUED) if one.task == "odd"]
    assert [(one.dataset, one.version, one.prompts, one.samples) for one in scores] == [
        *(("words", 0, 4, 1), ("odd", 0, 4, 3)),
        *(("words", 2, 4, 1), ("odd", 2, 4, 3)),
    ]
    assert {one.temperature for one in issued} == {1.0}
    rows = {one.member: one.rows[0].prompt for one in issued}
    assert all(rows[member] == rows[member // 3 * 3] for member in range(12))
    for score in scores[1::2]:
        correct = {int(one.trajectory_id.split("-")[1]) // 3 for one in score.members if one.reward}
        assert score.metrics["pass@1"] == pytest.approx(score.accuracy, abs=1e-6)
        assert score.metrics["pass@3"] == len(correct) / 4
        assert max(score.versions) >= score.version
    assert run.summary["accuracy_by_set"].keys() == {"words", "odd"}
