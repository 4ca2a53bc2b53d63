"""Programs work on rows in a sandbox with the policy as their model, and tests give the reward."""

import asyncio
import sys
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest

from asyncrl.config.harness_settings import KINDS, CommandSettings, HarnessSettings, MiniSettings, PythonSettings
from asyncrl.config.load import load_config
from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.environments.protocol import DataError
from asyncrl.errors import FunctionError
from asyncrl.harnesses.harness import HarnessFailed
from asyncrl.harnesses.kinds import harness_kind
from asyncrl.harnesses.rollout import harness_rollout
from asyncrl.run.preflight_harness import check_harnesses
from asyncrl.sandboxes.kinds import open_sandbox
from asyncrl.sandboxes.sandbox import SandboxError
from asyncrl.sandboxes.served import ServedSandbox
from harness.configs import the_problem
from harness.lives import Life, printable_tokenizer
from topics.prompts import PromptRow

SANDBOX = SandboxSettings(kind="none", trusted=True)
TESTS = {"first": ["grep", "-q", "one", "note"], "second": ["grep", "-q", "two", "note"]}
ROW = PromptRow("Write one and two.", metadata={"files": {"note": "zero\n"}, "tests": TESTS})
AGENT = """
import json, os, sys, urllib.request
body = {"model": "any", "messages": [{"role": "user", "content": sys.stdin.read()}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(address, json.dumps(body).encode(), headers)
reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("note", "a").write(reply)
print("wrote", reply)
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    return printable_tokenizer(Path(tmp_path_factory.mktemp("model")))


class Policy:
    """Writes given replies, one after the other."""

    def __init__(self, tokenizer: TaskTokenizer, *replies: str) -> None:
        self.prompts: list[str] = []
        self._tokenizer, self._replies = tokenizer, [*replies]

    def __call__(self, ids) -> list[int]:
        self.prompts.append(self._tokenizer.decode_all(ids))
        return [*self._tokenizer.encode(self._replies.pop(0)).tolist(), self._tokenizer.eos_ids[0]]


def rollout_of(settings: HarnessSettings, base: Path = Path()):
    return harness_rollout(harness_kind(settings).make(settings, base), settings, partial(open_sandbox, SANDBOX))


async def work(tokenizer, settings: HarnessSettings, *replies: str, row=ROW, recorded=(), base=Path(), takes_s=0.0):
    """Return a life in which a harness worked on a row, and its policy."""
    life, policy = Life(tokenizer, recorded, most=64), Policy(tokenizer, *replies)
    life.host.written, life.host.takes_s = policy, takes_s
    await life.run(partial(rollout_of(settings, base), row))
    return life, policy


async def test_commands_of_replies_run_and_the_tests_give_a_reward_in_parts(tokenizer):
    replies = ("```sh\necho one >> note; cat note; exit 3\n```", "It is done.")

    life, policy = await work(tokenizer, MiniSettings(), *replies)

    assert policy.prompts[1].endswith("exit code 3\nzero\none\n")
    outcome = life.context.outcome_given()
    assert (outcome.reward, outcome.metrics["tests_passed"]) == (0.5, 1.0)
    assert b"+one" in outcome.artefacts["diff"]
    assert b"second: exit code 1" in outcome.artefacts["tests"]
    [segment] = life.context.segments()
    assert tokenizer.decode(segment.tokens[segment.mask == 1]) == "".join(replies) != life.context.sampled_text()


async def test_a_reply_becomes_a_file_until_the_check_has_no_objection(tokenizer):
    settings = MiniSettings(file="note", check=["sh", "-c", "grep two note || echo none"], turns=3)
    checks = MiniSettings(file="note", check=["grep", "-c", "two", "note"], turns=3)

    _, once = await work(tokenizer, settings, "one")
    life, thrice = await work(tokenizer, checks, "one", "three", "one two")

    assert len(once.prompts) == 1
    assert thrice.prompts[2].endswith("three<eos>0\n")
    outcome, [segment] = life.context.outcome_given(), life.context.segments()
    assert (outcome.reward, outcome.turn_rewards) == (1.0, [0.0, 0.0, 1.0])
    assert [turn for turn, _ in segment.turns] == [0, 1, 2]


async def test_a_killed_program_or_check_is_a_fault_of_the_sandbox(tokenizer):
    killed = CommandSettings(command=["sh", "-c", "kill -9 $$"])
    check = MiniSettings(file="note", check=["sh", "-c", "kill -9 $$"])

    for settings in (killed, check):
        with pytest.raises(SandboxError, match="sh was killed, and had reached no limit of the sandbox"):
            await work(tokenizer, settings, "one")


async def test_a_slot_is_taken_only_while_the_program_works(tokenizer):
    settings, life, events = MiniSettings(), Life(tokenizer, most=64), []
    life.host.written = Policy(tokenizer, "It is done.")

    @asynccontextmanager
    async def noted(name, place):
        events.append(f"{name} begins")
        async with place as value:
            yield value
        events.append(f"{name} ends")

    life.host.slot = lambda: noted("slot", nullcontext())

    def opened():
        return noted("sandbox", open_sandbox(SANDBOX))

    await life.run(partial(harness_rollout(harness_kind(settings).make(settings, Path()), settings, opened), ROW))

    work, tests = ["sandbox begins", "slot begins", "slot ends", "sandbox ends"], ["sandbox begins", "sandbox ends"]
    assert events == [*work, *tests]
    assert life.context.outcome_given().reward == 0.0


async def test_a_program_in_the_sandbox_finds_the_policy_by_its_environment(tokenizer):
    settings = CommandSettings(command=[sys.executable, "agent.py"], files={"agent.py": AGENT})

    life, policy = await work(tokenizer, settings, "one, two")

    assert policy.prompts == ["Write one and two."]
    assert life.context.outcome_given().reward == 1.0
    assert life.context.completion == "wrote one, two\n"


async def test_a_resumed_trajectory_repeats_its_answers_and_an_abandoned_one_samples_again(tokenizer):
    replies = ("```sh\necho one >> note\n```", "done")
    first, _ = await work(tokenizer, MiniSettings(), *replies)
    await first.host.checkpoint()

    again, policy = await work(tokenizer, MiniSettings(), recorded=first.host.kept)
    fresh, _ = await work(tokenizer, MiniSettings(resume="abandon"), "other", recorded=first.host.kept)

    assert policy.prompts == []
    assert [one.tokens.tolist() for one in again.context.segments()] == [
        one.tokens.tolist() for one in first.context.segments()
    ]
    [segment] = fresh.context.segments()
    assert tokenizer.decode(segment.tokens[segment.mask == 1]) == "other"


async def test_a_failed_program_is_graded_dropped_or_given_a_reward(tokenizer):
    failing = ["sh", "-c", "echo one >> note; exit 7"]

    graded, _ = await work(tokenizer, CommandSettings(command=failing))
    paid, _ = await work(tokenizer, CommandSettings(command=failing, at_failure="reward", failure_reward=-1.0))
    with pytest.raises(HarnessFailed, match="sh: exit code 7"):
        await work(tokenizer, CommandSettings(command=failing, at_failure="drop"))

    assert graded.context.outcome_given().reward == 0.5
    assert graded.context.outcome_given().metrics["failed"] == 1.0
    assert paid.context.outcome_given().reward == -1.0


async def test_an_agent_that_raises_and_a_file_that_became_a_folder_are_failures_of_the_program(tokenizer, tmp_path):
    (tmp_path / "raising.py").write_text("async def run(): raise KeyError('no such tool')\n")
    folder = MiniSettings(file="note", check=["sh", "-c", "rm note; mkdir note; exit 1"])

    raised, _ = await work(tokenizer, PythonSettings(function="raising.py:run"), base=tmp_path)
    refused, _ = await work(tokenizer, folder, "one", "two")

    assert b"no such tool" in raised.context.outcome_given().artefacts["failure"]
    for life in (raised, refused):
        outcome = life.context.outcome_given()
        assert (outcome.reward, outcome.metrics["failed"]) == (0.0, 1.0)


async def test_the_time_limit_counts_the_program_and_not_its_wait_for_the_policy(tokenizer):
    waits = CommandSettings(command=[sys.executable, "agent.py"], files={"agent.py": AGENT}, time_limit_s=8.0)
    sleeps = CommandSettings(command=["sleep", "60"], time_limit_s=0.3)

    patient, _ = await work(tokenizer, waits, "one, two", takes_s=9.0)
    late, _ = await work(tokenizer, sleeps)

    assert patient.context.outcome_given().metrics["failed"] == 0.0
    assert b"longer than time_limit_s = 0.3" in late.context.outcome_given().artefacts["failure"]
    assert late.context.outcome_given().reward == 0.0


async def test_a_program_that_changes_its_tests_gets_nothing(tokenizer):
    check = {"check": "grep -q two note\n"}
    row = PromptRow("a", metadata={"files": check, "test_files": check, "tests": {"check": ["sh", "check"]}})

    life, _ = await work(tokenizer, MiniSettings(), "```sh\necho two > note; echo true > check\n```", "x", row=row)
    honest, _ = await work(tokenizer, MiniSettings(), "```sh\necho two > note\n```", "x", row=row)

    assert life.context.outcome_given().metrics["tests_changed"] == 1.0
    assert (life.context.outcome_given().reward, honest.context.outcome_given().reward) == (0.0, 1.0)


async def test_an_agent_of_the_user_takes_an_address_and_a_key(tokenizer, tmp_path):
    (tmp_path / "agent.py").write_text(
        "from openai import AsyncOpenAI\n"
        "async def run(row, base_url, api_key, sandbox):\n"
        "    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:\n"
        "        messages = [{'role': 'user', 'content': row.prompt}]\n"
        "        reply = await client.chat.completions.create(model='any', messages=messages)\n"
        "    await sandbox.put('note', reply.choices[0].message.content.encode())\n"
        "    return 'written'\n"
        "async def other(question): ...\n"
    )

    life, _ = await work(tokenizer, PythonSettings(function="agent.py:run"), "one two", base=tmp_path)

    assert (life.context.outcome_given().reward, life.context.completion) == (1.0, "written")
    with pytest.raises(FunctionError, match="it takes question; an agent may take row, base_url, api_key, sandbox"):
        harness_kind(other := PythonSettings(function="agent.py:other")).make(other, tmp_path)


async def test_a_conversation_that_fills_the_context_ends_and_is_graded(tokenizer):
    full = PromptRow("a" * 4096, metadata=ROW.metadata)
    life = Life(tokenizer, most=0)

    await life.run(partial(rollout_of(MiniSettings(file="note")), full))

    assert life.context.outcome_given().reward == 0.0
    assert b"diff" not in life.context.outcome_given().artefacts


async def test_without_tests_the_reward_of_the_run_judges_the_final_text(tokenizer):
    life, _ = await work(tokenizer, MiniSettings(), "an answer", row=PromptRow("a question"))

    assert life.context.outcome_given().reward is None
    assert life.context.completion == "an answer"


async def test_metadata_of_another_form_are_an_error_that_says_which(tokenizer):
    with pytest.raises(DataError, match=r"files, tests .*at `\$.tests\[...\]`"):
        await work(tokenizer, MiniSettings(), row=PromptRow("a", metadata={"tests": {"one": "sh check"}}))


@pytest.mark.parametrize("kind", KINDS)
async def test_each_harness_ends_with_its_sandbox_when_its_trajectory_is_cancelled(kind, tokenizer, tmp_path):
    (tmp_path / "agent.py").write_text("import asyncio\nasync def run(): await asyncio.sleep(600)\n")
    program = tmp_path / "slow"
    program.write_text("#!/bin/sh\nsleep 600\n")
    program.chmod(0o755)
    given = {
        "command": {"command": [str(program)]},
        "claude-code": {"program": str(program)},
        "codex": {"program": str(program)},
        "opencode": {"program": str(program)},
        "pi": {"program": str(program)},
        "python": {"function": "agent.py:run"},
    }
    settings = KINDS[kind](**given.get(kind, {}))
    ended, begun = [], asyncio.Event()

    @asynccontextmanager
    async def watched():
        sandbox = ServedSandbox(SANDBOX)
        await sandbox.start()
        begun.set()
        try:
            yield sandbox
        finally:
            await sandbox.destroy()
            ended.append(sandbox)

    life = Life(tokenizer, most=64)
    life.host.written, life.host.takes_s = Policy(tokenizer, "x"), 600.0
    task = asyncio.ensure_future(
        life.run(partial(harness_rollout(harness_kind(settings).make(settings, tmp_path), settings, watched), ROW))
    )
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert len(ended) == 1


@pytest.mark.parametrize(
    ("program", "found"), [("/no/claude", True), ("no-such-claude", True), ("sh", False), ("./mine", False)]
)
def test_a_program_that_the_machine_lacks_is_found_before_the_run(program: str, found: bool, tmp_path: Path):
    table = f"harnesses.agent={{kind='claude-code',program='{program}'}}"
    config = load_config("coder", overrides=[table, "task.rollout=harness:agent"]).config

    messages = [one.message for one in check_harnesses(config, tmp_path) if one.keys[0] == "harnesses.agent.program"]

    expected = f"this machine has no program {program}; install it, or set the path of the program"
    assert messages == ([expected] if found else [])


def test_a_table_of_a_harness_has_the_settings_of_its_kind():
    config = load_config("coder", overrides=["harnesses.agent={kind='command',command=['sh']}"]).config

    assert (config.harnesses["repair"].turns, config.harnesses["agent"].command) == (3, ["sh"])
    wrong = the_problem("coder", "harnesses.repair.tries=4")
    assert (wrong.key, wrong.message[:15]) == ("--set harnesses.repair.tries", "unknown setting")
    assert 'kind = one of "claude-code"' in the_problem("coder", "harnesses.agent={kind='other'}").message
