"""Claude Code, as npm gives it, works on a task of Harbor and on one of verifiers; a scripted policy is its model.

An optional check, as `tests/harnesses/test_agent_programs.py`: ASYNCRL_AGENT_CLIS names the folder of the program, and
ASYNCRL_VERIFIERS_PYTHON a Python with verifiers.
"""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from asyncrl.config.harness_settings import ClaudeCodeSettings
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.environments.kinds import make
from asyncrl.environments.protocol import Environment
from asyncrl.environments.verifiers.process import close_processes
from asyncrl.harnesses.kinds import harness_kind
from asyncrl.harnesses.rollout import harness_rollout
from asyncrl.sandboxes.kinds import open_sandbox
from harness.agent_programs import DONE, SAID, Policy, model_of_bytes
from harness.lives import Life
from harness.sandboxes import settings_of
from topics.prompts import PromptRow

CLIS, PYTHON = os.environ.get("ASYNCRL_AGENT_CLIS", ""), os.environ.get("ASYNCRL_VERIFIERS_PYTHON", "")
EXAMPLES = Path(__file__).parents[2] / "asyncrl" / "examples"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(not CLIS, reason="ASYNCRL_AGENT_CLIS names no folder of command-line agents"),
]


def harbor(folder: Path) -> Environment:
    task = Path(shutil.copytree(EXAMPLES / "digits" / "write-2", folder / "task"))
    lines = f"grep -qx '{SAID}' /app/made.txt && echo 1 > /logs/verifier/reward.txt\n"
    (task / "tests" / "test.sh").write_text(lines)
    (task / "task.toml").write_text("")
    return make("harbor", str(task), {}, 1)


def verifiers(folder: Path) -> Environment:
    if not PYTHON:
        pytest.skip("ASYNCRL_VERIFIERS_PYTHON names no Python with verifiers")
    code = (EXAMPLES / "sums_taskset.py").read_text()
    (folder / "ending.py").write_text(
        code.replace("trace.last_reply == self.data.answer", f"{DONE!r} in trace.last_reply")
    )
    return make("verifiers", "ending", {"python": PYTHON, "folder": str(folder)}, 1)


@pytest.mark.parametrize(("kind", "isolation"), [(harbor, "bubblewrap"), (harbor, "podman"), (verifiers, "bubblewrap")])
async def test_claude_code_works_on_a_task_and_its_reward_is_that_of_the_task(kind, isolation, tmp_path: Path):
    source = kind(tmp_path)
    row: PromptRow = source.row(0)
    tokenizer = TaskTokenizer.load(model_of_bytes(tmp_path / "model"))
    settings = ClaudeCodeSettings(program=str(Path(CLIS) / "claude"), time_limit_s=300.0)
    sandbox = settings_of(isolation, readable=[str(Path(CLIS).parents[1])], memory_mb=4096, processes=512)
    life = Life(tokenizer, most=2000)
    life.host.written = Policy(tokenizer)
    rollout = harness_rollout(harness_kind(settings).make(settings, tmp_path), settings, partial(open_sandbox, sandbox))
    try:
        await life.run(partial(rollout, row))

        outcome = life.context.outcome_given()
        assert outcome.metrics["failed"] == 0.0, (outcome.artefacts, life.context.completion)
        given = outcome.reward if outcome.reward is not None else source.score(life.context.sampled_text(), row)
        assert given == 1.0
    finally:
        close_processes()
