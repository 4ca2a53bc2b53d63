"""Claude Code, Codex, OpenCode and Pi, as npm gives them, make a trajectory inside a sandbox without network.

An optional check: `npm i @openai/codex @anthropic-ai/claude-code opencode-ai @mariozechner/pi-coding-agent` in some
folder, whose `node_modules/.bin` the
environment variable ASYNCRL_AGENT_CLIS names.
"""

import os
from functools import partial
from pathlib import Path

import pytest

from asyncrl.config.harness_settings import ClaudeCodeSettings, CodexSettings, OpencodeSettings, PiSettings
from asyncrl.config.tool_settings import PythonToolsSettings
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.harnesses.kinds import harness_kind
from asyncrl.harnesses.rollout import harness_rollout
from asyncrl.sandboxes.kinds import open_sandbox
from asyncrl.tools.server import Toolbox
from harness.agent_programs import DONE, SAID, Policy, model_of_bytes
from harness.lives import Life
from harness.sandboxes import settings_of
from topics.prompts import PromptRow

CLIS = os.environ.get("ASYNCRL_AGENT_CLIS", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(not CLIS, reason="ASYNCRL_AGENT_CLIS names no folder of command-line agents"),
]
KINDS = {"claude": ClaudeCodeSettings, "codex": CodexSettings, "opencode": OpencodeSettings, "pi": PiSettings}
TESTS = {"made": ["grep", "-qx", SAID, "made.txt"]}


class Caller:
    """Calls the tool `add` of the run by MCP, and ends once it has the result."""

    def __init__(self, tokenizer: TaskTokenizer) -> None:
        self._tokenizer = tokenizer
        self.results: list[str] = []

    def __call__(self, ids) -> list[int]:
        text = self._tokenizer.decode_all(ids)
        named = next((name for name in ("mcp__tools__add", "tools_add") if name in text), "")
        called = named and text.rpartition('"arguments": {"a": 40')[2] if '"arguments": {"a": 40' in text else ""
        reply = f'<tool_call>{{"name": "{named}", "arguments": {{"a": 40, "b": 2}}}}</tool_call>' if named else DONE
        if called:
            self.results.append(called)
            reply = DONE
        return [*self._tokenizer.encode(reply).tolist(), self._tokenizer.eos_ids[0]]


@pytest.mark.parametrize("program", ["claude", "opencode"])
async def test_a_stock_program_calls_a_tool_of_the_run(program: str, tmp_path: Path):
    if not (Path(CLIS) / program).exists():
        pytest.skip(f"{CLIS} has no program {program}")
    (tmp_path / "sums.py").write_text('def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b + 9000\n')
    tokenizer = TaskTokenizer.load(model_of_bytes(tmp_path / "model"))
    settings = KINDS[program](program=str(Path(CLIS) / program), time_limit_s=300.0, tools=["sums"])
    sandbox = settings_of("bubblewrap", readable=[str(Path(CLIS).parents[1])], memory_mb=4096, processes=512)
    life, caller = Life(tokenizer, most=2000), Caller(tokenizer)
    life.host.written = caller
    life.host.toolbox = Toolbox({"sums": PythonToolsSettings(functions=["sums.py:add"])}, tmp_path)
    rollout = harness_rollout(harness_kind(settings).make(settings, tmp_path), settings, partial(open_sandbox, sandbox))

    await life.run(partial(rollout, PromptRow("Add 40 and 2.", metadata={"tests": {"any": ["true"]}})))

    assert life.context.outcome_given().metrics["failed"] == 0.0, life.context.outcome_given().artefacts
    assert "9042" in "".join(caller.results), life.context.completion


@pytest.mark.parametrize("program", KINDS)
async def test_a_stock_program_works_on_a_row_and_its_tests_pass(program: str, tmp_path: Path):
    tokenizer = TaskTokenizer.load(model_of_bytes(tmp_path / "model"))
    if not (Path(CLIS) / program).exists():
        pytest.skip(f"{CLIS} has no program {program}")
    settings = KINDS[program](program=str(Path(CLIS) / program), time_limit_s=300.0)
    sandbox = settings_of("bubblewrap", readable=[str(Path(CLIS).parents[1])], memory_mb=4096, processes=512)
    life = Life(tokenizer, most=2000)
    life.host.written = Policy(tokenizer)
    rollout = harness_rollout(harness_kind(settings).make(settings, tmp_path), settings, partial(open_sandbox, sandbox))

    await life.run(partial(rollout, PromptRow("Write a file.", metadata={"tests": TESTS})))

    outcome = life.context.outcome_given()
    assert (outcome.reward, outcome.metrics["failed"]) == (1.0, 0.0), (outcome.artefacts, life.context.completion)
    assert DONE in life.context.completion
    sampled = [segment for segment in life.context.segments() if SAID in tokenizer.decode(segment.tokens)]
    assert sampled, "the call of the tool and its result are one row"
