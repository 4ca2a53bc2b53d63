"""Evaluations by engines of their own: one version, while training moves on and processes are killed."""

import json
from pathlib import Path

import pytest

from harness.audited import audited_clean, messages_on, topics_left_by
from harness.runs import up
from harness.user_code import HOLD
from topics.evals import EVAL_SCORED
from topics.topic import BATCHES

pytestmark = pytest.mark.slow

PROMPTS = 4
HOLDS = (
    HOLD
    + """
async def rollout(row, context):
    tokens = context.tokenizer.encode_prompt(row, max_tokens=None).tolist()
    tokens += (await context.generate(tokens, max_new_tokens=2)).tokens.tolist()
    await context.tool("hold", hold, row.metadata["folder"], row.metadata["number"])
    await context.generate(tokens, max_new_tokens=2)
"""
)
SETTINGS = [
    *("engine.groups.train.kind=embedded", "engine.groups.held.kind=embedded", "eval.engines=held"),
    *("learner.steps=9", "learner.keep_versions=4", f"eval.prompts={PROMPTS}", "workers.lease_s=1"),
    "eval.sets.slow.options={}",
]


async def test_an_evaluation_stays_at_its_version_while_training_moves_on_and_whoever_makes_or_reports_it_dies(
    tmp_path: Path,
):
    (tmp_path / "holds.py").write_text(HOLDS)
    rows = [{"prompt": "^a=", "label": "a", "metadata": {"folder": str(tmp_path), "number": n}} for n in range(PROMPTS)]
    source = tmp_path / "held.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [f"eval.sets.slow.rollout={tmp_path / 'holds.py'}:rollout", f"eval.sets.slow.source={source}"]
    async with up(tmp_path, *SETTINGS, *own) as run:
        await run.reaches(lambda: len(list(tmp_path.glob("called-*"))) == PROMPTS, "all of version 0 wait")
        await run.reaches(lambda: len(run.steps()) >= 6, "training moves on, and version 0 is none of the newest")
        await run.kill("engine-held-1")
        await run.kill("rollout-1")
        await run.kill("recorder-1")
        (tmp_path / "answer").touch()
        assert await run.ended() == 0, run.story
    await audited_clean(tmp_path)

    async with topics_left_by(run) as bus:
        scores = (await messages_on(bus, BATCHES)).on(EVAL_SCORED)
    assert [(one.version, one.failed, one.reason) for one in scores] == [(0, 0, ""), (9, 0, "")]
    assert [set(one.versions) for one in scores] == [{0}, {9}]
    assert sum(scores[0].versions.values()) >= 2 * PROMPTS
    rows = run.rows("eval")
    assert [(row["version"], [*row["versions"]], row["failed"]) for row in rows] == [(0, ["0"], 0), (9, ["9"], 0)]
